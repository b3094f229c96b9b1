"""Data sets by name, and from arrays, tensors or torch's data sets of a program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedcore.base.errors import DataError
from fedcore.base.identity import short_name
from fedcore.base.registry import call, resolve
from fedcore.base.seeding import derive_seed, random_stream
from fedcore.data.dataset import Dataset
from fedcore.data.images import ResidentSamples, Split, assemble
from fedcore.data.samples import Array, TensorSamples, as_array, check_labels, column_names, first_ten, in_order

KEYS = ("x_train", "y_train", "x_test", "y_test")
REGRESSION = "Regression is not possible: make classes, for example with numpy.digitize(y, edges)"
_READ_AGAIN = 16  # samples; a random flip of each is missed once in 65,536 sets
RENUMBER = (
    "names = numpy.unique(numpy.concatenate([y_train, y_test])), then numpy.searchsorted(names, y_train) and "
    "numpy.searchsorted(names, y_test)"
)
"""Makes labels 0..C-1 of names or numbers of any kind, the same in both parts."""


def load_dataset(spec: str, data_dir: Path | None = None) -> Dataset:
    """Return the data set ``spec``: a name, or the name behind a package's prefix.

    A loader is an entry point of the group ``fedcore.datasets``. It takes the directory of the data sets' files, None
    for the default, and returns a :class:`~fedcore.data.Dataset` or what :func:`as_dataset` makes one of. What it draws
    from a global random generator is the same at every call.

    :raises UnknownNameError: no installed package provides the name.
    :raises DataError: files are missing or damaged, or the loader returned something that is not usable.
    """
    loader: Callable[[Path | None], Any] = resolve("dataset", spec)
    with random_stream(derive_seed(0, "dataset")):  # runs of all seeds have the same samples
        found = call("dataset", spec, loader, data_dir)
        try:
            return as_dataset(found, short_name(spec))
        except DataError as error:
            raise DataError(f"dataset {spec!r} is not usable: {error}") from error


def default_data_dir() -> Path:
    """Return the directory named by FEDCORE_DATA, else ``~/.cache/fedcore/data``."""
    return Path(os.environ.get("FEDCORE_DATA") or "~/.cache/fedcore/data").expanduser()


def find_data(path: str, data_dir: Path | None) -> Path:
    """Return a file or folder of data: where ``path`` says, or of this name in ``data_dir``.

    A run whose data has moved thus goes on with another ``--data-dir``.
    """
    place = Path(os.path.expanduser(path))
    moved = () if data_dir is None else (data_dir / place, data_dir / place.name)
    return next((each for each in (place, *moved) if each.exists()), place)


def as_dataset(data: Any, name: str = "arrays") -> Dataset:
    """Return arrays, tensors or torch's data sets as a data set.

    - Arrays or tensors ``(x_train, y_train, x_test, y_test)``, or a mapping with these keys. Images are read by
      :func:`image_split` and normalised by the training images' statistics; x (n, H, W) of uint8 or floating point
      is always taken for images. x of other shapes, such as rows (n, d) of a table, is not normalised: floating-point
      numbers become float32, whole numbers int64. The columns of DataFrames are matched by name.
    - A pair ``(train, test)`` of torch's map-style data sets of (x, y). Every sample is read once, with the set's own
      transforms, which must not be random, and is not normalised further. Images (C, H, W) or (H, W) of uint8 are
      divided by 255. Classes are matched by name if both sets have ``classes``.

    :param name: name of the data set.
    :raises DataError: ``data`` has another form, or its shapes, types or labels do not fit.
    """
    if isinstance(data, Dataset):
        return _checked(data)
    if isinstance(data, Mapping):
        missing = [key for key in KEYS if key not in data]
        if missing:
            raise DataError(f"dataset has no {missing[0]!r}; expected the keys {', '.join(KEYS)}")
        dataset = _of_arrays([data[key] for key in KEYS], name)
        unused = sorted(repr(key) for key in data if key not in KEYS)
        note = f"dataset: keys not used: {first_ten(unused)}"
        return replace(dataset, notes=(*dataset.notes, *([note] if unused else [])))
    if isinstance(data, Sequence) and len(data) == len(KEYS):
        return _of_arrays(data, name)
    if isinstance(data, Sequence) and len(data) == 2 and all(hasattr(part, "__getitem__") for part in data):
        if all(hasattr(part, "__array__") for part in data):
            raise DataError(f"dataset is two arrays; expected four, ({', '.join(KEYS)}): docs/your-data.md")
        train, test = map(_stacked, data)
        forms = [f"{x.dtype} of shape {tuple(x.shape[1:])}".removeprefix("torch.") for x, _ in (train, test)]
        if forms[0] != forms[1]:
            raise DataError(f"dataset: training samples are {forms[0]}, test samples {forms[1]}; they must be alike")
        names, test_labels = _numbered_alike(data, train[1], test[1])
        return _checked(_of_tensors(name, train, (test[0], test_labels), names))
    raise DataError(
        f"dataset is a {type(data).__name__}; expected a fedcore.data.Dataset, arrays or tensors ({', '.join(KEYS)}), "
        "a mapping with these keys, or a pair (train, test) of torch's data sets"
    )


def _of_arrays(data: Sequence[Any], name: str) -> Dataset:
    x_train, y_train, x_test, y_test = data
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
    pixels = x_train.dtype == np.uint8 or x_train.dtype.kind == "f"
    if pixels and (x_train.ndim == 3 or (x_train.ndim == 4 and min(x_train.shape[1], x_train.shape[3]) <= 4)):
        train, test = image_split(x_train, y_train, "train"), image_split(x_test, y_test, "test")
        check_classes(train.labels, test.labels, "dataset")
        series = x_train.ndim == 3 and x_train.dtype != np.uint8 and x_train.shape[1] != x_train.shape[2]
        note = f"x_train {x_train.shape} is read as grey images; a pair of torch's data sets leaves it as it is"
        return assemble(name, train, test, notes=(note,) if series else ())
    return _of_tensors(name, _rows(x_train, y_train, "train"), _rows(x_test, y_test, "test"), columns=columns)


def _stacked(part: Any) -> tuple[Tensor, Tensor]:
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
    return inputs, class_labels(labels, len(inputs), f"y of {where}")


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
    found = {tuple(map(str, names)) for names in lists if isinstance(names, (list, tuple, np.ndarray))} - {()}
    if len(found) > 1:
        first, second = map(first_ten, sorted(found)[:2])
        raise DataError(
            f"dataset: a ConcatDataset joins a set with the classes {first} and one with the classes {second}; number "
            "the classes alike, and give all its sets the same attribute classes"
        )
    return found.pop() if found else ()


def _leaves(part: Any) -> list[Any]:
    """Return the data sets that a data set of torch chooses from or joins, as its samples keep their labels."""
    if isinstance(part, torch_data.Subset):
        return _leaves(part.dataset)
    if isinstance(part, torch_data.ConcatDataset):
        return [leaf for each in part.datasets for leaf in _leaves(each)]
    return [part]


def numbered_as(labels: Tensor, names: Sequence[str], known: Sequence[str], where: str) -> Tensor:
    """Return labels (n,) int64, numbers of the classes ``names``, as the numbers of these classes in ``known``.

    :param where: whose labels they are, for the message.
    :raises DataError: a label has no name, its class is not known, or one of two different lists names a class twice.
        The message holds both lists.
    """
    ours, theirs = f"its classes are {first_ten(names)}", f"the known ones are {first_ten(known)}"
    outside = labels[(labels < 0) | (labels >= len(names))]
    if len(outside):
        raise DataError(f"{where}: {len(outside)} labels, such as {int(outside[0])}, have no class: {ours}")
    if list(names) == list(known):
        return labels
    numbers = {name: number for number, name in enumerate(known)}
    if len(numbers) < len(known) or len(set(names)) < len(names):
        raise DataError(f"{where}: two classes have one name, so names cannot match them: {ours}; {theirs}")
    order = torch.tensor([numbers.get(name, -1) for name in names])
    renumbered = order[labels]
    unknown = labels[renumbered < 0]
    if len(unknown):
        raise DataError(f"{where}: class {names[int(unknown[0])]!r} is not known: {ours}; {theirs}")
    return renumbered


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
    :param where: what the message begins with, such as ``FILE: ``.
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
    return Split(torch.from_numpy(np.ascontiguousarray(x)), class_labels(y, len(x), f"{where}y_{part}"))


def _rows(x: Array, y: Array, part: str) -> tuple[Tensor, Tensor]:
    name = f"dataset: x_{part}"
    if x.dtype.kind not in "fiub" or not x.size:
        raise DataError(f"{name} holds {x.dtype} of shape {x.shape}; convert it to numbers of shape (n, ...)")
    x = _finite(x, name) if x.dtype.kind == "f" else x.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(x)), class_labels(y, len(x), f"dataset: y_{part}")


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


def class_labels(y: Array, count: int, where: str) -> Tensor:
    """Return an array of classes as labels (n,) int64; also of shape (n, 1).

    :raises DataError: it does not hold ``count`` whole numbers. The message tells how to convert it.
    """
    if y.ndim == 2 and y.shape[1] == 1:  # the shape Keras gives CIFAR labels
        y = y[:, 0]
    if y.shape == (count,) and y.dtype.kind in "iu":
        return torch.from_numpy(y.astype(np.int64))
    hint = ""
    if y.ndim == 2 and y.dtype.kind in "fiub":
        one_hot = (np.sort(y, axis=1) == np.eye(1, y.shape[1], y.shape[1] - 1)).all()
        hint = ". They become labels by y.argmax(axis=1)" if one_hot else ". A sample has one class, not several labels"
    elif y.dtype.kind == "b":
        hint = ". They become labels by y.astype(int)"
    elif y.dtype.kind == "f":
        known = y[~np.isnan(y)]
        lead = "They" if known.size == y.size else "Leave out samples whose label is NaN; the others"
        whole = np.array_equal(known, np.floor(known))
        hint = f". {lead} become labels by y.astype(int){_doubt(known)}" if whole else f". {REGRESSION}"
    elif y.dtype.kind in "OUS":
        hint = f". Names become labels by {RENUMBER}"
    raise DataError(
        f"{where}: labels must be integers of shape ({count},), one for each sample, "
        f"not {y.dtype} of shape {y.shape}{hint}"
    )


def _doubt(labels: Array) -> str:
    """Return the condition of an advice on labels that have as many values as a quantity."""
    distinct = len(np.unique(labels))
    few = distinct <= max(10, len(labels) / 10)
    return "" if few else f" if their {distinct} different values are classes and no quantity. {REGRESSION}"


def _checked(dataset: Dataset) -> Dataset:
    """Return a data set whose parts fit each other.

    :raises DataError: names the part, and what it should be.
    """
    classes, domains = dataset.num_classes, dataset.domains
    for samples in (dataset.train, dataset.test):
        check_labels(samples.labels, len(samples))
    for name, values, count in (
        ("class_names", dataset.class_names, classes),
        ("sources", dataset.sources, len(dataset.train)),
        ("domains.train", domains.train if domains else None, len(dataset.train)),
        ("domains.test", domains.test if domains else None, len(dataset.test)),
    ):
        if values is not None and len(values) != count:
            raise DataError(f"dataset: {name} has {len(values)} entries, expected {count}")
        if values is not None and name != "class_names" and not isinstance(values, Tensor):
            raise DataError(f"dataset: {name} is a {type(values).__name__}, expected an int64 tensor ({count},)")
    _check_numbers("classes", f"num_classes is {classes}", dataset.train.labels, dataset.test.labels, classes)
    if domains:
        names = len(domains.names)
        _check_numbers("domains", f"domains.names has {names}", domains.train, domains.test, names)
    if isinstance(dataset.train, TensorSamples) and isinstance(dataset.test, TensorSamples):
        return replace(dataset, test=dataset.test.with_columns(dataset.train.columns, "dataset: the test table"))
    return dataset


def _check_numbers(what: str, known: str, train: Tensor, test: Tensor, count: int) -> None:
    """Refuse numbers of classes or domains that are not 0 to ``count - 1``.

    :param known: where the count comes from, for the message.
    """
    for part, numbers in (("training", train), ("test", test)):
        outside = numbers[(numbers < 0) | (numbers >= count)]
        if len(outside):
            raise DataError(
                f"dataset: {len(outside)} of {len(numbers)} {part} samples have {what} outside of 0..{count - 1}, "
                f"such as {int(outside[0])}; {known}. Leave out samples without one, and number the {what} from 0"
            )


def check_classes(train: Tensor, test: Tensor, where: str) -> None:
    """Refuse labels (n,) int64 that are not 0..C-1 with every class in the training part.

    :raises DataError: names the labels, the classes that are missing, and how to renumber labels.
    """
    found = torch.unique(train)
    unseen = test[~torch.isin(test, found)]
    if len(unseen):
        raise DataError(
            f"{where}: labels must be 0..C-1 with every class in y_train, but {len(unseen)} of {len(test)} test "
            f"samples have classes without a training sample: {first_ten(torch.unique(unseen).tolist())}. Add "
            "training samples of these classes, or leave these test samples out of x_test and y_test; if numbers are "
            f"then missing, renumber both parts together: {RENUMBER}{_doubt(train.numpy())}"
        )
    if not torch.equal(found, torch.arange(len(found))):
        without = "Leave out samples without a class, then r" if found[0] < 0 else "R"
        raise DataError(
            f"{where}: labels must be 0..C-1 with every class in y_train; found {int(found[0])}..{int(found[-1])} "
            f"({len(found)} distinct) in y_train. {without}enumber both parts together: "
            f"{RENUMBER}{_doubt(train.numpy())}"
        )
