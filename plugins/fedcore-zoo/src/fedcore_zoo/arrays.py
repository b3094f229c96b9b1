"""Data sets from arrays, tensors or torch's data sets of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedcore import DataError
from fedcore.data import (
    Dataset,
    ResidentSamples,
    Split,
    Task,
    TensorSamples,
    assemble,
    first_ten,
    numbered_as,
    task_of,
    with_labels,
)
from fedcore_zoo.cells import as_array, check_rows, column_names, in_order
from fedcore_zoo.labels import check_classes

Array: TypeAlias = npt.NDArray[Any]

KEYS = ("x_train", "y_train", "x_test", "y_test")
_READ_AGAIN = 16  # samples; a random flip of each is missed once in 65,536 sets


def arrays(data: Any, name: str, task: str) -> Dataset:
    """Return arrays or torch's data sets as a data set; see :func:`fedcore.data.as_dataset`."""
    if isinstance(data, Mapping):
        missing = [key for key in KEYS if key not in data]
        if missing:
            raise DataError(f"dataset has no {missing[0]!r}; expected the keys {', '.join(KEYS)}")
        dataset = _of_arrays([data[key] for key in KEYS], name, task)
        unused = sorted(repr(key) for key in data if key not in KEYS)
        note = f"dataset: keys not used: {first_ten(unused)}"
        return replace(dataset, notes=(*dataset.notes, *([note] if unused else [])))
    if isinstance(data, Sequence) and len(data) == len(KEYS):
        return _of_arrays(data, name, task)
    if (
        isinstance(data, Sequence)
        and len(data) == 2
        and all({"__getitem__", "__len__"} <= {*dir(part)} for part in data)
    ):
        if all(hasattr(part, "__array__") or _is_pair(part) for part in data):
            raise DataError(f"dataset is two arrays or pairs; expected four, ({', '.join(KEYS)}): docs/your-data.md")
        train, test = map(_stacked, data)
        forms = [f"{x.dtype} of shape {tuple(x.shape[1:])}".removeprefix("torch.") for x, _ in (train, test)]
        if forms[0] != forms[1]:
            raise DataError(f"dataset: training samples are {forms[0]}, test samples {forms[1]}; they must be alike")
        kind = task_of(task, train[1])
        if not kind.classes:
            zeros = [(x, torch.zeros(len(x), dtype=torch.int64)) for x, _ in (train, test)]
            return with_labels(_of_tensors(name, zeros[0], zeros[1]), kind, train[1], test[1])
        read = [Task.read(y, len(x), f"y of {type(part).__name__}") for part, (x, y) in zip(data, (train, test))]
        names, test_labels = _numbered_alike(data, *read)
        return _of_tensors(name, (train[0], read[0]), (test[0], test_labels), names)
    parts, hint = data if isinstance(data, Sequence) else (), ""
    if any(isinstance(part, torch_data.DataLoader) for part in parts):
        hint = ". The data set of a DataLoader is loader.dataset"
    elif any(isinstance(part, torch_data.IterableDataset) for part in parts):
        hint = ". Samples are read by position: give list(...) of an IterableDataset"
    raise DataError(
        f"dataset is a {type(data).__name__}; expected a fedcore.data.Dataset, arrays or tensors ({', '.join(KEYS)}), "
        f"a mapping with these keys, or a pair (train, test) of torch's data sets{hint}"
    )


def _is_pair(part: Any) -> bool:
    """Return whether it is a pair of arrays, such as (x_train, y_train) of Keras, and no list of samples."""
    return isinstance(part, (tuple, list)) and len(part) == 2 and all(hasattr(each, "__array__") for each in part)


def _of_arrays(data: Sequence[Any], name: str, task: str) -> Dataset:
    x_train, y_train, x_test, y_test = data
    check_rows(x_train, y_train, "dataset: y_train")
    check_rows(x_test, y_test, "dataset: y_test")
    columns = column_names(x_train)
    x_test = in_order(x_test, columns, "dataset: x_test")
    try:
        x_train, y_train, x_test, y_test = (
            as_array(part, f"dataset: {key}")
            for key, part in zip(KEYS, (x_train, y_train, x_test, y_test), strict=True)
        )
    except ValueError as error:
        raise DataError(
            "dataset: a list does not become one array, for its entries have different shapes. Sequences of different "
            "lengths: a Dataset of SequenceSamples, docs/your-data.md"
        ) from error
    if not x_test.ndim or not len(x_test):
        raise DataError(
            "dataset: x_test holds no samples, but the server measures on it. Where all samples are the clients', give "
            "their test samples together: docs/your-data.md"
        )
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        swapped = x_train.ndim > 1 and x_train.shape[1:] == y_train.shape[1:]
        order = f". The order is {', '.join(KEYS)}; train_test_split returns another one" if swapped else ""
        raise DataError(
            f"dataset: x_train holds {x_train.dtype} of shape {x_train.shape[1:]}, x_test {x_test.dtype} of shape "
            f"{x_test.shape[1:]}; they must be alike{order}"
        )
    if not (kind := task_of(task, y_train)).classes:
        one, other = (np.zeros(len(x), np.int64) for x in (x_train, x_test))
        return with_labels(_of_arrays([x_train, one, x_test, other], name, "classification"), kind, y_train, y_test)
    pixels = x_train.dtype == np.uint8 or x_train.dtype.kind == "f"
    if pixels and (x_train.ndim == 3 or (x_train.ndim == 4 and min(x_train.shape[1], x_train.shape[3]) <= 4)):
        train, test = image_split(x_train, y_train, "train"), image_split(x_test, y_test, "test")
        check_classes(train.labels, test.labels, "dataset")
        series = x_train.ndim == 3 and x_train.dtype != np.uint8 and x_train.shape[1] != x_train.shape[2]
        note = f"x_train {x_train.shape} is read as grey images; a pair of torch's data sets leaves it as it is"
        return assemble(name, train, test, notes=(note,) if series else ())
    return _of_tensors(name, _rows(x_train, y_train, "train"), _rows(x_test, y_test, "test"), columns=columns)


def _stacked(part: Any) -> tuple[Tensor, Array]:
    """Return inputs and labels of one of torch's data sets."""
    where = type(part).__name__
    try:
        samples = [part[position] for position in range(len(part))]
        inputs = torch.stack([torch.as_tensor(x) for x, _ in samples])
        labels = np.asarray([as_array(y, f"y of {where}") for _, y in samples])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset: the samples of {where} do not stack to one tensor: {error}. It must give pairs (x, y), x of one "
            "shape (transform=ToTensor() of torchvision makes images tensors) and y one whole number; for other data "
            "write a class of samples: docs/your-data.md"
        ) from error
    if inputs.is_floating_point():
        inputs = torch.from_numpy(_finite(inputs.float().cpu().numpy(), f"dataset: x of {where}"))
    again = torch.stack([torch.as_tensor(part[position][0]) for position in range(min(len(part), _READ_AGAIN))])
    if not torch.equal(again.to(inputs), inputs[: len(again)]):
        raise DataError(
            f"dataset: {where} gives other inputs when it is read again. Samples are read once, so leave out random "
            "transforms; --augment changes images in each batch: docs/your-data.md"
        )
    if inputs.dtype == torch.uint8 and inputs.ndim == 3:  # grey images, as in arrays
        inputs = inputs.unsqueeze(1)
    return inputs, labels


def _numbered_alike(parts: Sequence[Any], train: Tensor, test: Tensor) -> tuple[tuple[str, ...] | None, Tensor]:
    """Return the names of the classes if they are known, and the test labels by the training set's numbers.

    :raises DataError: the names differ, and the labels may not be their positions. The message holds both lists.
    """
    names, of_test = map(_class_names, parts)
    chosen = len(names) > int(train.max()) + 1  # of a whole set whose samples were chosen and maybe renumbered
    if names and of_test and names != of_test:
        if chosen or any(getattr(leaf, "target_transform", None) for part in parts for leaf in _leaves(part)):
            raise DataError(
                f"dataset: the training set has the classes {first_ten(names)}; the test set {first_ten(of_test)}. "
                "Labels seem to be renumbered, so names cannot match them; if both sets number the classes alike, "
                "give both the same attribute classes"
            )
        test = numbered_as(test, of_test, names, "dataset: test set")
    return (None if chosen else names or None), test


def _class_names(part: Any) -> tuple[str, ...]:
    """Return the names of the classes of one of torch's data sets; empty if it has none.

    :raises DataError: it joins sets whose names differ.
    """
    lists = [getattr(leaf, "classes", None) for leaf in _leaves(part)]
    distinct = {tuple(map(str, names)) for names in lists if isinstance(names, (list, tuple, np.ndarray))} - {()}
    if len(distinct) > 1:
        first, second = map(first_ten, sorted(distinct)[:2])
        raise DataError(
            f"dataset: a ConcatDataset joins a set with the classes {first} and one with the classes {second}; number "
            "the classes alike, and give all its sets the same attribute classes"
        )
    return distinct.pop() if distinct else ()


def _leaves(part: Any) -> list[Any]:
    """Return the data sets that a data set of torch chooses from or joins, as its samples keep their labels."""
    if isinstance(part, torch_data.Subset):
        return _leaves(part.dataset)
    if isinstance(part, torch_data.ConcatDataset):
        return [leaf for each in part.datasets for leaf in _leaves(each)]
    return [part]


def _of_tensors(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    class_names: tuple[str, ...] | None = None,
    columns: tuple[str, ...] = (),
) -> Dataset:
    """Return a data set of inputs that are not normalised."""
    check_classes(train[1], test[1], "dataset")
    shape = tuple(train[0].shape[1:])
    parts = [
        ResidentSamples.from_pixels(*part, [0.0] * shape[0], [1.0] * shape[0])
        if len(shape) == 3 and part[0].dtype in (torch.float32, torch.uint8)
        else TensorSamples(*part, columns=columns)
        for part in (train, test)
    ]
    classes = int(train[1].max()) + 1
    model = None if len(shape) == 3 else "mlp"
    return Dataset(name, parts[0], parts[1], classes, shape, class_names=class_names, model=model)


def image_split(x: Array, y: Array, part: str, where: str = "") -> Split:
    """Return arrays of images and labels as a part of a data set.

    :param x: (n, H, W), (n, H, W, C) or (n, C, H, W) with up to 4 channels (the last axis is tried first), uint8 or
        floating point.
    :param y: whole numbers (n,) or (n, 1).
    :param part: ``train`` or ``test``, for the message.
    :param where: the beginning of the message, such as ``FILE: ``.
    :raises DataError: they have another shape or type, or hold no pixels or numbers that are not finite.
    """
    name = f"{where}x_{part}"
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and 1 <= x.shape[3] <= 4:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or not 1 <= x.shape[1] <= 4:
        hint = ". Rows of numbers: hf:FILE.csv, or module:... (docs/your-data.md)" if x.ndim == 2 else ""
        raise DataError(f"{name}: shape {x.shape}; expected (n, H, W), (n, H, W, C) or (n, C, H, W), C up to 4{hint}")
    if not x.size:
        raise DataError(f"{name}: shape {x.shape} holds no pixels")
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            raise DataError(f"{name}: type {x.dtype}; convert it to uint8 (0..255) or to floating point")
        x = _finite(x, name)
    return Split(torch.from_numpy(np.ascontiguousarray(x)), Task.read(y, len(x), f"{where}y_{part}"))


def _rows(x: Array, y: Array, part: str) -> tuple[Tensor, Tensor]:
    name = f"dataset: x_{part}"
    if x.dtype.kind not in "fiub" or not x.size:
        raise DataError(f"{name} holds {x.dtype} of shape {x.shape}; convert it to numbers of shape (n, ...)")
    x = _finite(x, name) if x.dtype.kind == "f" else x.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(x)), Task.read(y, len(x), f"dataset: y_{part}")


def _finite(x: Array, where: str) -> Array:
    """Return floating-point numbers as float32."""
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{where}: sample {int(finite.argmin())} holds numbers that are not finite in float32 "
            f"(NaN, infinite or too large), as do {int((~finite).sum())} of {len(x)} samples; replace or drop them"
        )
    return x
