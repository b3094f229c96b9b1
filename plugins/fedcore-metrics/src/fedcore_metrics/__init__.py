"""Metrics of a classifier from counts that add up over samples.

A mean over classes is over the classes that the samples have: a client often lacks classes, and a model cannot be right
or wrong about them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore import Metric

__all__ = ["AUROC", "BalancedAccuracy", "CalibrationError", "MacroF1"]


class MacroF1(Metric):
    """The mean over the classes of the harmonic mean of precision and recall."""

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return right predictions, predictions and samples by class, (3, C)."""
        predicted = logits.argmax(dim=1)
        return torch.stack(
            [values.bincount(minlength=self.num_classes) for values in (labels[predicted == labels], predicted, labels)]
        )

    def value(self, counts: Tensor) -> float:
        """Return the macro-F1."""
        right, predicted, samples = counts
        return float((2 * right / (predicted + samples))[samples > 0].mean())


class BalancedAccuracy(Metric):
    """The mean over the classes of the accuracy on their samples (recall)."""

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return right predictions and samples by class, (2, C)."""
        right = labels[logits.argmax(dim=1) == labels]
        return torch.stack([values.bincount(minlength=self.num_classes) for values in (right, labels)])

    def value(self, counts: Tensor) -> float:
        """Return the balanced accuracy."""
        right, samples = counts
        return float((right / samples)[samples > 0].mean())


class CalibrationError(Metric):
    """The expected calibration error (Guo et al., ICML 2017): the gap between confidence and accuracy, over 15 bins.

    The confidence is the largest softmax value. A bin counts with its share of the samples.
    """

    lower_is_better = True
    bins = 15

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return samples, the sum of their confidences and right predictions by bin, (3, 15)."""
        confidence, predicted = logits.double().softmax(dim=1).nan_to_num().max(dim=1)
        members = (confidence * self.bins).long().clamp(max=self.bins - 1).unsqueeze(1) == torch.arange(
            self.bins, device=logits.device
        )
        values = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).double()])
        return (values.unsqueeze(2) * members).sum(dim=1)

    def value(self, counts: Tensor) -> float:
        """Return the calibration error, from 0 to 1."""
        samples, confidence, right = counts
        return float((confidence - right).abs().sum() / samples.sum())


class AUROC(Metric):
    """The area under the ROC curve of each class against the others, averaged over the classes.

    The score of a class is counted in bins, and two scores in one bin count as equal. The score is the log-odds u of
    the class, as u / (5 + |u|): it has the order of the probability, but equal bins of the probability would put nearly
    all samples of a good model into the first and the last one. A bin is 0.01 wide at u = 0, and 0.25 at u = 20.
    """

    bins = 1000

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return samples of other classes and of the class by class and bin, (2, C, 1000)."""
        log_share = logits.double().log_softmax(dim=1)
        odds = (log_share - torch.log1p(-log_share.exp())).nan_to_num()
        place = ((odds / (5 + odds.abs()) + 1) / 2 * self.bins).long().clamp(0, self.bins - 1)
        classes = torch.arange(self.num_classes, device=logits.device)
        place += self.bins * (classes + self.num_classes * (labels.unsqueeze(1) == classes))
        return place.flatten().bincount(minlength=2 * self.num_classes * self.bins).view(2, self.num_classes, self.bins)

    def value(self, counts: Tensor) -> float:
        """Return the mean area over the classes that the samples have, unless these are all of one class."""
        others, own = counts
        below = others.cumsum(dim=1) - others / 2  # a tie counts one half
        pairs = own.sum(dim=1) * others.sum(dim=1)
        return float(((own * below).sum(dim=1) / pairs)[pairs > 0].mean())
