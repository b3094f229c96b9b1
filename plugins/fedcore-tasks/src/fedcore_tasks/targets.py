"""What the tasks of this package share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import ConfigError, Counts, DataError, Metric
from fedcore.data import Task

Array = npt.NDArray[Any]

BINS = 10
"""Groups of similar numbers, for partitions."""

MANY = 20
"""Figures of each label or class are recorded for at most this many."""


class TaskFigure(Metric):
    """One of a task's figures of the same counts.

    :param shared: the name of the counts.
    :param count: takes logits and labels, returns counts.
    :param value: takes the counts of all samples, returns the figure.
    :param shape: of the counts; the first number of counts by row counts for one sample.
    :param by_row: whether ``count`` returns a row for each sample.
    """

    shape: torch.Size

    def __init__(
        self,
        shared: str,
        count: Callable[[Tensor, Tensor], Tensor],
        value: Callable[[Tensor], float],
        shape: tuple[int, ...],
        *,
        lower_is_better: bool = False,
        by_row: bool = False,
    ) -> None:
        super().__init__(0)
        self._count, self._value, self.shape = count, value, torch.Size(shape)
        self.lower_is_better, self.by_row, self.shared = lower_is_better, by_row, shared  # type: ignore[misc]

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the counts of samples, float64."""
        return self._count(logits, labels)

    def value(self, counts: Tensor) -> float:
        """Return the figure."""
        return self._value(counts)


class Targets(Task):
    """A task whose labels are no classes of samples."""

    classes = False
    on_grid: ClassVar[bool] = False
    """Whether a label is a grid of them, such as a mask: one for each position. The form keeps its size."""

    def __init__(self, labels: Tensor) -> None:
        self.build(self.form_of(labels))

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> Self:
        """Return the task that has this form."""
        task = cls.__new__(cls)
        task.build(form)
        return task

    @classmethod
    def form_of(cls, labels: Tensor) -> dict[str, Any]:
        """Return the form of training labels, plain values."""
        grid = {"grid": [*labels.shape[1:]]} if cls.on_grid else {}
        return {"width": cls.width(labels), "flat": labels.ndim == 1, **grid}

    def build(self, form: Mapping[str, Any]) -> None:
        """Set what follows from the form."""
        self.form = form
        self.grid = tuple(map(int, form.get("grid", ())))
        self.flat = bool(form["flat"])
        """Whether a label is one number instead of a row of them."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Refuse: the task has no probabilities."""
        raise ConfigError(f"task {self.name!r} predicts no probabilities; result.predict returns its predictions")

    def strata(self, labels: Tensor) -> Tensor:
        """Return one group."""
        return torch.zeros(len(labels), dtype=torch.int64)

    def count(self, logits: Tensor, labels: Tensor, *, confusion: bool = False) -> Counts:
        """Return the sum of the loss, in float64."""
        none = torch.zeros((), dtype=torch.float64)
        return Counts(
            total=torch.tensor(len(logits), device=logits.device),
            loss=self.loss(logits.double(), labels) * len(logits) if len(logits) else none,
            undefined=(~logits.flatten(1).isfinite().all(dim=1)).sum(),
        )

    def shaped(self, predictions: Tensor) -> Tensor:
        """Return predictions (B, C) in the form of the labels: (B,) if these are single numbers."""
        return predictions.squeeze(1) if self.flat else predictions


def columns(labels: Tensor) -> Tensor:
    """Return labels (B,) or (B, C) as (B, C)."""
    return labels.unsqueeze(1) if labels.ndim == 1 else labels


def numbers(y: Array, count: int, where: str, task: str) -> Array:
    """Return an array of numbers (count, ...).

    :raises DataError: it holds something else, or numbers that are not finite.
    """
    if y.shape[:1] != (count,) or y.dtype.kind not in "fiub":
        raise DataError(f"{where}: task {task!r} takes {count} numbers or rows of numbers, not {y.dtype} of {y.shape}")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        first = int((~np.isfinite(y).reshape(count, -1).all(axis=1)).argmax())
        raise DataError(f"{where}: the label of sample {first} is not finite; replace it, or leave out the sample")
    return y


def censored(y: Array) -> bool:
    """Return whether labels are rows (time, event): positive numbers, not all of them whole, next to 0 or 1."""
    if y.ndim != 2 or y.shape[1] != 2 or y.dtype.kind != "f":
        return False
    time, event = y.T
    return bool(np.isin(event, (0, 1)).all() and (time >= 0).all() and (time != np.floor(time)).any())


def bins_of(values: Tensor, bins: int = BINS) -> Tensor:
    """Return the number of each value's bin between quantiles, (n,) int64; equal values are in one bin."""
    edges = torch.quantile(values.double(), torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
    return torch.bucketize(values.double().contiguous(), edges.unique(), right=True)
