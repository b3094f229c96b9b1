"""Data sets in the user's own files: arrays in one ``.npz`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.data.samples import Dataset
from fedcore.data.split import Split, assemble, first_ten, span, unused

Array: TypeAlias = npt.NDArray[Any]


def npz(path: Path) -> Dataset:
    """Return the user's own images: x_train, y_train, x_test, y_test in one ``.npz`` file.

    x is (n, H, W), (n, H, W, C) or (n, C, H, W) with up to 4 channels (the last axis is tried first), uint8
    (then divided by 255) or floating point; y is (n,) integers, 0..C-1 for C classes. Normalised by the
    training images' mean and standard deviation.

    :raises DataError: the file is missing, damaged or of another kind.
    """
    train, test, others = _read_npz(path)
    if train.images.dtype != test.images.dtype:
        raise DataError(f"{path}: x_train and x_test must have the same type, both uint8 or both floating point")
    check_classes(train.labels, test.labels, str(path))
    return assemble(f"npz:{path.name}", train, test, notes=unused(str(path), "arrays", others))


RENUMBER = (
    "names = numpy.unique(numpy.concatenate([y_train, y_test])), then numpy.searchsorted(names, y_train) and "
    "numpy.searchsorted(names, y_test)"
)
"""Labels from names or numbers of any kind, the same in both parts."""


def check_classes(train: Tensor, test: Tensor, where: str) -> None:
    """Refuse labels (n,) int64 that are not 0..C-1 with every class in the training part.

    :raises DataError: with what was found, which classes are missing, and how to renumber labels.
    """
    found = torch.unique(train)
    unseen = test[~torch.isin(test, found)]
    if len(unseen):
        names = first_ten(torch.unique(unseen).tolist())
        raise DataError(
            f"{where}: labels must be 0..C-1 with every class in y_train, but {len(unseen)} of {len(test)} test "
            f"samples have classes without a training sample: {names}. Add training samples of these classes, or leave "
            "these test samples out of x_test and y_test; if numbers are then missing, renumber both parts together: "
            f"{RENUMBER}"
        )
    if not torch.equal(found, torch.arange(len(found))):
        raise DataError(
            f"{where}: labels must be 0..C-1 with every class in y_train; found {span(train)} "
            f"({len(found)} distinct) in y_train and {span(test)} in y_test. Renumber both parts together: {RENUMBER}"
        )


def how_to_number(y: Array) -> str:
    """Return what makes labels of what is none yet, as the end of a message; empty where it cannot be told."""
    if y.ndim == 2 and y.shape[1] == 1:
        return ". A single column becomes labels by y.ravel()"
    if y.ndim == 2:
        return ". Rows with one 1 become labels by y.argmax(axis=1)"
    if y.ndim == 1 and y.dtype.kind == "f" and np.array_equal(y, np.floor(y)):
        return ". Whole numbers become labels by y.astype(int)"
    if y.ndim == 1 and y.dtype.kind in "OUS":
        return f". Names become labels by {RENUMBER}"
    return ""


def read_npz(path: Path) -> tuple[Split, Split]:
    """Return the training and the test part of an ``.npz`` file; never unpickles.

    :raises DataError: the file is missing, damaged or of another kind.
    """
    train, test, _ = _read_npz(path)
    return train, test


def _read_npz(path: Path) -> tuple[Split, Split, list[str]]:
    """Return the training and the test part, and the names of other arrays; raises as :func:`read_npz`."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise DataError(
            f"npz: {path} {what}; expected a file written by numpy.savez with the arrays "
            "x_train, y_train, x_test, y_test"
        )
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an archive made by numpy.savez")
        with content:
            absent = [key for key in keys if key not in content]
            if absent:
                raise ValueError(f"without {', '.join(absent)} (it has {', '.join(content) or 'nothing'})")
            x_train, y_train, x_test, y_test = (content[key] for key in keys)
            others = [key for key in content if key not in keys]
    except Exception as error:  # zip, zlib, header parser, memory: an untrusted file may raise anything
        raise DataError(
            f"{path} is not a usable .npz file: {error or type(error).__name__}. It must hold "
            f"{', '.join(keys)} as plain arrays (no Python objects)."
        ) from error
    train = image_split(x_train, y_train, "train", f"{path}: ")
    return train, image_split(x_test, y_test, "test", f"{path}: "), others


def image_split(x: Array, y: Array, part: str, where: str = "") -> Split:
    """Return arrays of images and labels as :func:`npz` reads them.

    :param part: ``train`` or ``test``, for messages, which begin with ``where``.
    :raises DataError: shapes or types other than these.
    """
    return Split(_images_from_array(x, f"{where}x_{part}"), _labels_from_array(y, x, f"{where}y_{part}"))


def _images_from_array(x: Array, where: str) -> Tensor:
    """Return (n, C, H, W), uint8 or float32."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and 1 <= x.shape[3] <= 4:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or not 1 <= x.shape[1] <= 4:
        raise DataError(f"{where}: shape {x.shape}; expected (n, H, W), (n, H, W, C) or (n, C, H, W), C up to 4")
    if not x.size:
        raise DataError(f"{where}: shape {x.shape} holds no pixels")
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            raise DataError(f"{where}: type {x.dtype}; convert it to uint8 (0..255) or to floating point")
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if not finite.all():
            raise DataError(
                f"{where}: sample {int(finite.argmin())} holds numbers that are not finite in float32 "
                f"(NaN, infinite or too large), as do {int((~finite).sum())} of {len(x)} samples; replace or drop them"
            )
    return torch.from_numpy(np.ascontiguousarray(x))


def _labels_from_array(y: Array, x: Array, where: str) -> Tensor:
    if y.ndim == 2 and y.shape[1] == 1:  # the shape Keras gives CIFAR labels
        y = y[:, 0]
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise DataError(
            f"{where}: labels must be integers of shape ({len(x)},), one for each image, "
            f"not {y.dtype} of shape {y.shape}{how_to_number(y)}"
        )
    if int(y.min()) < 0 or int(y.max()) >= 2**31:
        raise DataError(f"{where}: labels must be 0..C-1; found {int(y.min())}..{int(y.max())}")
    return torch.from_numpy(y.astype(np.int64))
