"""Arrays of classes as labels, and what to do about arrays that are not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedcore import DataError
from fedcore.data import first_ten, other_task
from fedcore_zoo.cells import Array

REGRESSION = "Numbers to predict are targets of --task regression, of the package fedcore-tasks"
RENUMBER = (
    "names = numpy.unique(numpy.concatenate([y_train, y_test])), then numpy.searchsorted(names, y_train) and "
    "numpy.searchsorted(names, y_test)"
)
"""Makes labels 0..C-1 of names or numbers of any kind, the same in both parts."""


def class_labels(y: Array, count: int, where: str) -> Tensor:
    """Return an array of classes as labels (n,) int64; also of shape (n, 1).

    :raises DataError: it does not hold ``count`` whole numbers. The message tells how to convert it.
    """
    if y.ndim == 2 and y.shape[1] == 1:  # the shape Keras gives CIFAR labels
        y = y[:, 0]
    if y.shape == (count,) and y.dtype.kind in "iu":
        return torch.from_numpy(y.astype(np.int64))
    hint = other_task(y)
    if y.ndim == 2 and y.dtype.kind in "fiub" and (np.sort(y, axis=1) == np.eye(1, y.shape[1], y.shape[1] - 1)).all():
        hint = ". They become labels by y.argmax(axis=1)"
    elif y.ndim == 1 and y.dtype.kind == "b":
        hint = ". They become labels by y.astype(int)"
    elif y.ndim == 1 and y.dtype.kind == "f":
        known = y[~np.isnan(y)]
        lead = "They" if known.size == y.size else "Leave out samples whose label is NaN; the others"
        if np.array_equal(known, np.floor(known)):
            hint = f". {lead} become labels by y.astype(int){_doubt(known)}"
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


def check_classes(train: Tensor, test: Tensor, where: str) -> None:
    """Refuse labels (n,) int64 that are not 0..C-1 with every class in the training part.

    :raises DataError: names the labels, the classes that are missing, and how to renumber labels.
    """
    classes = torch.unique(train)
    unseen = test[~torch.isin(test, classes)]
    if len(unseen):
        raise DataError(
            f"{where}: labels must be 0..C-1 with every class in y_train, but {len(unseen)} of {len(test)} test "
            f"samples have classes without a training sample: {first_ten(torch.unique(unseen).tolist())}. Add "
            "training samples of these classes, or leave these test samples out of x_test and y_test; if numbers are "
            f"then missing, renumber both parts together: {RENUMBER}{_doubt(train.numpy())}"
        )
    if not torch.equal(classes, torch.arange(len(classes))):
        without = "Leave out samples without a class, then r" if classes[0] < 0 and len(classes) > 2 else "R"
        raise DataError(
            f"{where}: labels must be 0..C-1 with every class in y_train; found {int(classes[0])}..{int(classes[-1])} "
            f"({len(classes)} distinct) in y_train. {without}enumber both parts together: "
            f"{RENUMBER}{_doubt(train.numpy())}"
        )
