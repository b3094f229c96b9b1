"""Metrics of a classifier from counts that add up over samples.

A mean over classes is over the classes that the samples have: a client often lacks classes, and a model cannot be right
or wrong about them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedcore import Metric

__all__ = ["AUROC", "BalancedAccuracy", "BrierScore", "CalibrationError", "CalibrationSlope", "MacroF1"]


class MacroF1(Metric):
    """The mean over the classes of the harmonic mean of precision and recall."""

    shared = "hits"

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


class BalancedAccuracy(MacroF1):
    """The mean over the classes of the accuracy on their samples (recall)."""

    def value(self, counts: Tensor) -> float:
        """Return the balanced accuracy."""
        right, _, samples = counts
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

    def curve(self, counts: Tensor) -> Mapping[str, Sequence[float]]:
        """Return a reliability diagram: each bin's mean confidence and accuracy, nan for a bin without samples."""
        samples, confidence, right = counts
        return {"x": (confidence / samples).tolist(), "y": (right / samples).tolist()}


class BrierScore(Metric):
    """The mean squared error of the softmax (Brier 1950): the sum over the classes, halved for two of them.

    scikit-learn's ``brier_score_loss`` has the same scale. It is from 0 to 1 for two classes, else from 0 to 2.
    """

    lower_is_better = True

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the squared errors and the number of samples, (2,)."""
        shares = logits.double().softmax(dim=1).nan_to_num()
        errors = (shares - torch.nn.functional.one_hot(labels, self.num_classes)).square().sum(dim=1)
        return torch.stack([errors.sum(), torch.ones_like(errors).sum()])

    def value(self, counts: Tensor) -> float:
        """Return the Brier score."""
        errors, samples = counts.tolist()
        scale = 2 if self.num_classes == 2 else 1
        return float(errors / samples / scale) if samples else math.nan


class AUROC(Metric):
    """The area under the ROC curve of each class against the others, averaged over the classes.

    The score of a class is counted in bins, and two scores in one bin count as equal. The score is the log-odds u of
    the class, as u / (5 + |u|): it has the order of the probability, but equal bins of the probability would put nearly
    all samples of a good model into the first and the last one. A bin is 0.01 wide at u = 0, and 0.25 at u = 20.
    """

    bins = 1000

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return samples of other classes and of the class by class and bin, (2, C, 1000)."""
        place = _places(_log_odds(logits), labels, self.bins).flatten()
        return place.bincount(minlength=2 * self.num_classes * self.bins).view(2, self.num_classes, self.bins)

    def value(self, counts: Tensor) -> float:
        """Return the mean area over the classes that the samples have, unless these are all of one class."""
        others, own = counts
        below = others.cumsum(dim=1) - others / 2  # a tie counts one half
        pairs = own.sum(dim=1) * others.sum(dim=1)
        return float(((own * below).sum(dim=1) / pairs)[pairs > 0].mean())

    def curve(self, counts: Tensor) -> Mapping[str, Sequence[float]]:
        """Return the ROC curve at false positive rates of 0, 0.01 to 1.

        It is the mean over the classes that the samples have. Of two classes it is the curve of the second one.
        """
        others, own = counts.flip(2).cumsum(dim=2).numpy()  # (C, 1000): the samples above each threshold
        classes = [1] if self.num_classes == 2 else range(self.num_classes)
        present = [c for c in classes if others[c, -1] and own[c, -1]]
        rates = [(np.r_[0, others[c] / others[c, -1]], np.r_[0, own[c] / own[c, -1]]) for c in present]
        x = np.linspace(0, 1, 101)
        return (
            {"x": x.tolist(), "y": np.mean([np.interp(x, *rate) for rate in rates], axis=0).tolist()} if rates else {}
        )


class CalibrationSlope(Metric):
    """The slope b of the logistic regression of a class on the model's log-odds u of it: logit P = a + b u.

    It is 1 for a calibrated model, and below 1 for one that is too sure. Of several classes it is the mean over each
    against the others, of two it is the same for both (Cox 1958; Van Calster et al. 2016). The log-odds are between -30
    and 30, and counted in 200 bins with their mean.
    """

    lower_is_better = None
    bins = 200

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return samples of other classes and of the class and the sums of their log-odds, (2, 2, C, 200)."""
        odds = _log_odds(logits).clamp(-30, 30)
        place = _places(odds, labels, self.bins).flatten()
        weights = torch.stack([torch.ones_like(odds), odds]).flatten(1)
        counts = torch.zeros(2, 2 * self.num_classes * self.bins, dtype=torch.float64, device=logits.device)
        return counts.index_add_(1, place, weights).view(2, 2, self.num_classes, self.bins)

    def value(self, counts: Tensor) -> float:
        """Return the mean slope over the classes; nan without samples of two classes, or if a score parts them."""
        samples, odds = counts.sum(dim=1)[0], counts.sum(dim=1)[1] / counts.sum(dim=1)[0]
        slopes = [
            _slope(odds[c].nan_to_num(), samples[c], counts[0, 1, c])
            for c in range(self.num_classes)
            if 0 < counts[0, 1, c].sum() < samples[c].sum()
        ]
        return float(np.mean(slopes)) if slopes else math.nan


def _log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of each class, (B, C) float64."""
    log_share = logits.double().log_softmax(dim=1)
    return (log_share - torch.log1p(-log_share.exp())).nan_to_num()


def _places(odds: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Return the places of samples in counts of the shape (2, C, bins), (B, C) int64: own classes in the second part.

    :param odds: log-odds u, which have the bins of u / (5 + |u|).
    """
    place = ((odds / (5 + odds.abs()) + 1) / 2 * bins).long().clamp(0, bins - 1)
    classes = torch.arange(odds.shape[1], device=odds.device)
    return place + bins * (classes + len(classes) * (labels.unsqueeze(1) == classes))


def _slope(odds: Tensor, samples: Tensor, positive: Tensor) -> float:
    """Return the slope of a logistic regression, by Newton's method; nan if it does not converge.

    It takes standardised log-odds: where all are far from 0, as of a rare class, intercept and slope would go together,
    and the steps would overshoot.

    :param odds: the log-odds of each bin, (bins,).
    :param samples: the samples of each bin.
    :param positive: those among them that are of the class.
    """
    centred = odds - odds @ samples / samples.sum()
    deviation = (centred.square() @ samples / samples.sum()).sqrt()
    x, at = torch.stack([torch.ones_like(odds), centred / deviation]), torch.zeros(2, dtype=torch.float64)
    for _ in range(100):
        shares = (at @ x).sigmoid()
        curvature = (x * (samples * shares * (1 - shares))) @ x.T
        step, problem = torch.linalg.solve_ex(curvature, x @ (positive - samples * shares))
        if problem or not step.isfinite().all():
            break
        at = at + step / step.abs().max().clamp(min=1)
        if step.abs().max() < 1e-9:
            return float(at[1] / deviation)
    return math.nan
