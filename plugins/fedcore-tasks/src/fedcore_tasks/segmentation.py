"""Segmentation: a class for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import DataError
from fedcore_tasks.targets import MANY, Array, Targets, TaskFigure, numbers

IGNORED = 255
"""The number of pixels of no class, as in PASCAL VOC and Cityscapes; -1 says the same."""


class Segmentation(Targets):
    """Masks (n, H, W) of classes 0..C-1; cross-entropy plus the Dice loss. Class 0 is the background.

    Pixels of 255 or -1 are of no class. They have no part in losses and figures.
    A model gives features (B, d, H, W) and logits (B, C, H, W).
    """

    name = "segmentation"
    example = "digit-shapes"
    model = "small-fcn"
    on_grid = True

    def build(self, form: Mapping[str, Any]) -> None:
        """Set the figures, too."""
        super().build(form)
        classes = int(form["width"])
        figure = partial(TaskFigure, "overlaps", _overlaps, shape=(3, classes))
        self.metrics = {"dice": figure(partial(_mean, _dice)), "iou": figure(partial(_mean, _iou))}
        if classes <= MANY:
            for one in range(classes):
                self.metrics[f"dice-{one}"] = figure(partial(_of_class, _dice, one))
                self.metrics[f"iou-{one}"] = figure(partial(_of_class, _iou, one))

    @classmethod
    def suits(cls, y: Array) -> bool:
        """Return whether labels are masks of whole numbers."""
        y = _without_channel(y)
        return y.ndim == 3 and y.dtype.kind in "fiub" and bool((y == np.floor(y)).all())

    @classmethod
    def read(cls, y: Array, count: int, where: str) -> Tensor:
        """Return masks (n, H, W) as int64; ignored pixels are -1."""
        y = _without_channel(numbers(y, count, where, cls.name))
        if y.ndim != 3 or not y.size or y.min() < -1 or not cls.suits(y):
            raise DataError(
                f"{where}: task {cls.name!r} takes masks (n, H, W) of whole numbers from 0, {IGNORED} or -1 for pixels "
                f"of no class, not {y.dtype} of {y.shape}" + (f" from {y.min()}" if y.size else "")
            )
        masks = y.astype(np.int64)
        if masks.max() == IGNORED and not ((masks > 0) & (masks < IGNORED)).any():
            raise DataError(f"{where}: its masks hold 0 and {IGNORED} alone; write 1 for the pixels of the class")
        return torch.from_numpy(np.where(masks == IGNORED, -1, masks))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the pixels, plus 1 - the mean over the classes of the batch's soft Dice."""
        known = labels.unsqueeze(1) >= 0
        shares = logits.softmax(dim=1) * known
        true = (labels.unsqueeze(1) == torch.arange(logits.shape[1], device=labels.device).view(1, -1, 1, 1)).to(shares)
        pixels = (0, 2, 3)
        dice = (2 * (shares * true).sum(pixels) + 1) / (shares.sum(pixels) + true.sum(pixels) + 1)
        errors = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return errors / known.sum().clamp(min=1) + 1 - dice.mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax of each pixel, (B, C, H, W)."""
        return logits.softmax(dim=1)

    def strata(self, labels: Tensor) -> Tensor:
        """Return samples by the class, other than the background, of most pixels; those without one are a group."""
        classes = max(2, self.width(labels))
        pixels = torch.stack([(labels == one).flatten(1).sum(dim=1) for one in range(1, classes)], dim=1)
        return torch.where(pixels.any(dim=1), pixels.argmax(dim=1) + 1, 0)


def _without_channel(y: Array) -> Array:
    """Return masks (n, H, W) of (n, 1, H, W) or (n, H, W, 1), as torch and Keras have them."""
    if y.ndim == 4 and 1 in (y.shape[1], y.shape[3]):
        return y[:, 0] if y.shape[1] == 1 else y[..., 0]
    return y


def _overlaps(logits: Tensor, labels: Tensor) -> Tensor:
    """Return pixels that are right, predicted and true by class, (3, C) float64."""
    classes, known = logits.shape[1], labels >= 0
    predicted, labels = logits.argmax(dim=1)[known], labels[known]
    parts = (labels[predicted == labels], predicted, labels)
    return torch.stack([part.bincount(minlength=classes) for part in parts]).double()


def _dice(counts: Tensor) -> Tensor:
    """Return Dice by class; nan for a class that is neither there nor predicted."""
    right, predicted, true = counts.unbind()
    return 2 * right / (predicted + true)


def _iou(counts: Tensor) -> Tensor:
    """Return the intersection over union by class; nan for a class that is neither there nor predicted."""
    right, predicted, true = counts.unbind()
    return right / (predicted + true - right)


def _mean(figure: Callable[[Tensor], Tensor], counts: Tensor) -> float:
    return float(figure(counts).nanmean())


def _of_class(figure: Callable[[Tensor], Tensor], one: int, counts: Tensor) -> float:
    return float(figure(counts)[one])
