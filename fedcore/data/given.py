"""Data sets that a Python program has already: arrays, tensors, torch's data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.data.files import check_classes, how_to_number, image_split
from fedcore.data.rows import TensorSamples
from fedcore.data.samples import Dataset, ResidentSamples, Samples
from fedcore.data.split import assemble, unused

KEYS = ("x_train", "y_train", "x_test", "y_test")
FORMS = (
    "a fedcore.data.Dataset, arrays or tensors (x_train, y_train, x_test, y_test), a mapping with these keys, or a "
    "pair (train, test) of torch's data sets"
)


def as_dataset(given: Any, name: str) -> Dataset:
    """Return arrays, tensors or torch's data sets as a data set.

    - Arrays or tensors ``(x_train, y_train, x_test, y_test)``, or a mapping with these keys: images as in an
      ``npz:`` file, normalised by the training images' statistics; x of other shapes, such as rows (n, d) of a table,
      is taken as it is, floating-point numbers as float32, whole numbers as int64.
    - A pair ``(train, test)`` of torch's map-style data sets of (x, y): every sample is read once, with the set's own
      transforms, and is not normalised further.

    :param name: of the data set.
    :raises DataError: none of these, or shapes, types or labels that do not fit.
    """
    if isinstance(given, Dataset):
        return given
    if isinstance(given, Mapping):
        missing = [key for key in KEYS if key not in given]
        if missing:
            raise DataError(f"dataset has no {missing[0]!r}; expected the keys {', '.join(KEYS)}")
        others = [str(key) for key in given if key not in KEYS]
        dataset = _from_arrays([_array(given[key]) for key in KEYS], name)
        return replace(dataset, notes=unused("dataset", "keys", others))
    if isinstance(given, Sequence) and len(given) == len(KEYS):
        return _from_arrays([_array(value) for value in given], name)
    if isinstance(given, Sequence) and len(given) == 2 and all(hasattr(part, "__getitem__") for part in given):
        return _from_torch(given[0], given[1], name)
    raise DataError(f"dataset is a {type(given).__name__}; expected {FORMS}")


def _array(value: Any) -> Any:
    """Return an array or tensor as a NumPy array."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _from_arrays(arrays: Sequence[Any], name: str) -> Dataset:
    x_train, y_train, x_test, y_test = arrays
    for key, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if not len(x) or len(x) != len(y):
            raise DataError(f"dataset: x_{key} has {len(x)} samples and y_{key} {len(y)} labels")
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise DataError(
            f"dataset: x_train holds {x_train.dtype} of shape {x_train.shape[1:]}, x_test {x_test.dtype} of shape "
            f"{x_test.shape[1:]}; they must be alike"
        )
    if _are_images(x_train):
        train, test = image_split(x_train, y_train, "train"), image_split(x_test, y_test, "test")
        check_classes(train.labels, test.labels, "dataset")
        return assemble(name, train, test)
    return _dataset(name, _rows(x_train, y_train, "train"), _rows(x_test, y_test, "test"))


def _are_images(x: Any) -> bool:
    """Whether an array is of images: uint8 or floating point, (n, H, W), (n, H, W, C) or (n, C, H, W), C up to 4."""
    shaped = x.ndim == 3 or (x.ndim == 4 and (1 <= x.shape[3] <= 4 or 1 <= x.shape[1] <= 4))
    return bool(shaped and (x.dtype == np.uint8 or x.dtype.kind == "f"))


def _rows(x: Any, y: Any, part: str) -> tuple[Tensor, Tensor]:
    if x.dtype.kind not in "fiub":
        raise DataError(f"dataset: x_{part} holds {x.dtype}; convert it to numbers")
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32 if x.dtype.kind == "f" else np.int64))
    if not torch.isfinite(inputs).all():
        raise DataError(f"dataset: x_{part} holds numbers that are not finite; replace or drop these samples")
    return inputs, _labels(y, f"y_{part}")


def _labels(y: Any, where: str) -> Tensor:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"dataset: {where}: labels must be whole numbers of shape (n,), not {y.dtype} of shape "
            f"{y.shape}{how_to_number(y)}"
        )
    return torch.from_numpy(y.astype(np.int64))


def _from_torch(train: Any, test: Any, name: str) -> Dataset:
    parts = []
    for part in (train, test):
        samples = [part[position] for position in range(len(part))]
        if not samples or not all(isinstance(sample, Sequence) and len(sample) == 2 for sample in samples):
            raise DataError(f"dataset: {type(part).__name__} must give pairs (x, y) and hold some")
        inputs = [torch.as_tensor(x) for x, _ in samples]
        if len({(x.shape, x.dtype) for x in inputs}) != 1:
            raise DataError(
                f"dataset: the samples of {type(part).__name__} have different shapes or types; bring them to one, or "
                "write a class of samples: docs/data.md"
            )
        stacked = torch.stack(inputs)
        if stacked.dtype == torch.float64:
            stacked = stacked.float()
        try:
            labels = np.asarray([_array(y) for _, y in samples])
        except ValueError:  # of different shapes
            raise DataError(f"dataset: y of {type(part).__name__} must be one whole number for each sample") from None
        parts.append((stacked, _labels(labels, f"y of {type(part).__name__}")))
    names = getattr(train, "classes", None)
    return _dataset(name, *parts, class_names=tuple(map(str, names)) if names else None)


def _dataset(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, class_names: tuple[str, ...] | None = None
) -> Dataset:
    check_classes(train[1], test[1], "dataset")
    return Dataset(
        name=name,
        train=_samples(*train),
        test=_samples(*test),
        num_classes=int(train[1].max()) + 1,
        input_shape=tuple(train[0].shape[1:]),
        class_names=class_names,
        model=None if train[0].ndim == 4 else "mlp",
    )


def _samples(inputs: Tensor, labels: Tensor) -> Samples:
    if inputs.ndim == 4 and inputs.dtype == torch.float32:  # as they are: in units of 0 and 1
        return ResidentSamples(inputs, labels, [0.0] * inputs.shape[1], [1.0] * inputs.shape[1])
    return TensorSamples(inputs, labels)
