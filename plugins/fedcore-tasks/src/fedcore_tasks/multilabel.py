"""Several labels for each sample, each of which is there or not; also two classes by one logit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import DataError
from fedcore_tasks.targets import MANY, Array, Targets, TaskFigure, columns, numbers


class MultiLabel(Targets):
    """Labels (n, C) of 0 and 1, binary cross-entropy. Labels (n,) are two classes, which one logit tells apart.

    A label is predicted if its logit is above 0.
    """

    name = "multilabel"
    example = "digit-properties"

    def build(self, form: Mapping[str, Any]) -> None:
        """Set the figures."""
        super().build(form)
        width = int(form["width"])
        of_hits = partial(TaskFigure, "hits", _hits, shape=(3, width))
        of_scores = partial(TaskFigure, "scores", _scores, shape=(1, width, 2), by_row=True)
        self.metrics = {"macro-f1": of_hits(_macro_f1), "micro-f1": of_hits(_micro_f1), "auroc": of_scores(mean_area)}
        if 1 < width <= MANY:
            for label in range(width):
                self.metrics[f"auroc-{label}"] = of_scores(partial(_area_of, label))
                self.metrics[f"positives-{label}"] = of_hits(partial(_positives, label))

    @classmethod
    def suits(cls, y: Array) -> bool:
        """Return whether labels are rows of 0 and 1, of which not all have a single 1."""
        rows = y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "fiub" and y.size > 0
        return rows and bool(np.isin(y, (0, 1)).all()) and not bool((y.sum(axis=1) == 1).all())

    @classmethod
    def read(cls, y: Array, count: int, where: str) -> Tensor:
        """Return 0 and 1 (n, C) or (n,) as float32."""
        y = numbers(y, count, where, cls.name)
        if y.ndim > 2 or y.shape[1:] == (0,) or not np.isin(y, (0, 1)).all():
            raise DataError(f"{where}: task {cls.name!r} takes rows (n, C) of 0 and 1, or 0 and 1 (n,)")
        return torch.from_numpy(y.astype(np.float32))

    @classmethod
    def width(cls, labels: Tensor) -> int:
        """Return the number of labels."""
        return columns(labels).shape[1]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy, the mean over samples and labels."""
        return F.binary_cross_entropy_with_logits(logits, columns(labels).to(logits.dtype))

    def predict(self, logits: Tensor) -> Tensor:
        """Return 1 for labels that are predicted, else 0: (B, C) or (B,) int64."""
        return self.shaped((logits > 0).long())

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the sigmoid, (B, C) or (B,)."""
        return self.shaped(logits.sigmoid())

    def strata(self, labels: Tensor) -> Tensor:
        """Return samples by their rarest label; those without a label are a group of their own."""
        rows = columns(labels)
        if self.flat:
            return labels.long()
        rarity = 1.0 / (1.0 + rows.sum(dim=0))
        return torch.where(rows.any(dim=1), (rows * rarity).argmax(dim=1) + 1, 0)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return right predictions, predictions and samples by label, (3, C) float64."""
    predicted, true = logits > 0, columns(labels) > 0
    return torch.stack([part.sum(dim=0).double() for part in (predicted & true, predicted, true)])


def _macro_f1(counts: Tensor) -> float:
    """Return the mean F1; a label that is neither there nor predicted counts as 0, as in scikit-learn."""
    right, predicted, true = counts
    return float((2 * right / (predicted + true).clamp(min=1)).mean())


def _micro_f1(counts: Tensor) -> float:
    right, predicted, true = counts.sum(dim=1)
    return float(2 * right / (predicted + true).clamp(min=1))


def _positives(label: int, counts: Tensor) -> float:
    return float(counts[2, label])


def _scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logit and label of every sample and label, (B, C, 2) float64."""
    return torch.stack([logits.double(), columns(labels).double()], dim=2)


def mean_area(rows: Tensor) -> float:
    """Return the area under the ROC curve, the mean over the labels that some samples have and others have not.

    :param rows: scores and labels, (n, C, 2).
    """
    areas = [_area(scores.numpy(), true.numpy() > 0) for scores, true in zip(rows[..., 0].T, rows[..., 1].T)]
    known = [area for area in areas if area == area]
    return float(np.mean(known)) if known else float("nan")


def _area_of(label: int, rows: Tensor) -> float:
    return mean_area(rows[:, [label]])


def _area(scores: Array, positive: Array) -> float:
    """Return the share of pairs of a positive and a negative sample in the right order; ties count one half."""
    pairs = float(positive.sum()) * float((~positive).sum())
    if not pairs:
        return float("nan")
    place, counts = np.unique(scores, return_inverse=True, return_counts=True)[1:]
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / pairs)
