"""Regression of one or several numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import DataError
from fedcore_tasks.targets import Array, Targets, TaskFigure, bins_of, censored, columns, numbers


class Regression(Targets):
    """Numbers (n,) or (n, C), mean squared error.

    The model is trained on targets that are standardised by the mean and the deviation of the clients' training parts.
    Figures and predictions are in the units of the targets. Those of several numbers are means over the numbers.
    """

    name: ClassVar[str] = "regression"

    @classmethod
    def form_of(cls, labels: Tensor) -> dict[str, Any]:
        """Return the means and deviations, too."""
        values = columns(labels).double()
        std = values.std(dim=0, correction=0)
        std = torch.where(std > 0, std, 1.0)
        # Lists: a task travels to every process, and its tensors would have to follow the device.
        return {**super().form_of(labels), "mean": values.mean(dim=0).tolist(), "std": std.tolist()}

    def build(self, form: Mapping[str, Any]) -> None:
        """Set means, deviations and figures."""
        super().build(form)
        self.mean, self.std = list(map(float, form["mean"])), list(map(float, form["std"]))
        figure = partial(TaskFigure, "sums", self._sums, shape=(5, len(self.mean)))
        self.metrics = {
            "rmse": figure(self._root_mean, lower_is_better=True),
            "mae": figure(self._mean, lower_is_better=True),
            "r2": figure(_explained),
        }

    @classmethod
    def suits(cls, y: Array) -> bool:
        """Return whether labels are floating-point numbers with fractions; one class of the family answers."""
        if cls is not Regression or y.dtype.kind != "f" or y.ndim not in (1, 2) or censored(y):
            return False
        known = y[np.isfinite(y)]
        return not np.array_equal(known, np.floor(known))

    @classmethod
    def read(cls, y: Array, count: int, where: str) -> Tensor:
        """Return numbers (n,) or (n, C) as float64; (n, 1) as (n,)."""
        y = numbers(y, count, where, cls.name)
        if y.ndim > 2 or y.shape[1:] == (0,):
            raise DataError(f"{where}: task {cls.name!r} takes a number or a row of numbers, not {y.shape}")
        return torch.from_numpy(np.array(y[:, 0] if y.shape[1:] == (1,) else y, dtype=np.float64))

    @classmethod
    def width(cls, labels: Tensor) -> int:
        """Return the number of numbers."""
        return columns(labels).shape[1]

    def fitted(self, labels: Tensor) -> Self:
        """Return the task that standardises by these labels."""
        return type(self)(labels)

    def standardised(self, labels: Tensor) -> Tensor:
        """Return labels in the units of the logits, (B, C) float64."""
        each = zip(columns(labels).double().unbind(dim=1), self.mean, self.std, strict=True)
        return torch.stack([(column - mean) / std for column, mean, std in each], dim=1)  # scalars: nothing is copied

    def distance(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of standardised targets."""
        return F.mse_loss(logits, targets)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over samples and numbers, of standardised targets."""
        return self.distance(logits, self.standardised(labels).to(logits.dtype))

    def predict(self, logits: Tensor) -> Tensor:
        """Return the predicted numbers, (B,) or (B, C) float64, in the targets' units."""
        return self.shaped(logits.double() * self._vector(self.std, logits) + self._vector(self.mean, logits))

    def strata(self, labels: Tensor) -> Tensor:
        """Return the bin of the first number between its deciles."""
        return bins_of(columns(labels)[:, 0])

    @staticmethod
    def _vector(values: list[float], like: Tensor) -> Tensor:
        return like.new_tensor(values, dtype=torch.float64)

    def _sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return samples, sums and squares of targets, errors and their squares by number, standardised, (5, C)."""
        targets = self.standardised(labels)
        errors = logits.double() - targets
        parts = (torch.ones_like(targets), targets, targets.square(), errors.abs(), errors.square())
        return torch.stack([part.sum(dim=0) for part in parts])

    def _mean(self, counts: Tensor) -> float:
        return float((counts[3] / counts[0] * self._vector(self.std, counts)).mean())

    def _root_mean(self, counts: Tensor) -> float:
        return float(((counts[4] / counts[0]).sqrt() * self._vector(self.std, counts)).mean())


class RegressionL1(Regression):
    """Numbers, mean absolute error."""

    name = "regression-l1"

    def distance(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean absolute error."""
        return F.l1_loss(logits, targets)


class RegressionHuber(Regression):
    """Numbers, Huber's loss: squares of errors up to one standard deviation, absolute values beyond."""

    name = "regression-huber"

    def distance(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return Huber's loss."""
        return F.huber_loss(logits, targets)


def _explained(counts: Tensor) -> float:
    """Return R2; nan if a number is the same for all samples."""
    samples, sums, squares, _, errors = counts
    variation = squares - sums.square() / samples
    constant = variation <= 1e-12 * squares
    return float(torch.where(constant, torch.nan, 1 - errors / variation).mean())
