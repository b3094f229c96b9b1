"""What is counted of a model's outputs on labelled samples, and metrics next to accuracy and loss: ``--metric NAME``.

Packages bring metrics by entry points of the group ``fedcore.metrics``. The package fedcore-metrics makes and checks
them for a run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore.base.files import finite
from fedcore.base.protocols import SIGNS
from fedcore.base.tensors import check_tensors, flatten, out_of_range, unflatten
from fedcore.base.types import Tensors

Metrics = Mapping[str, "Metric"]
"""The metrics of a run, by the name under which records have their figures."""

NO_METRICS: Metrics = MappingProxyType({})


class Metric(ABC):
    """A figure of a model on samples, computed from counts.

    Chunks of samples are counted one by one, in threads and on clients. Their counts are added, and the sum gives the
    figure. Only counts leave a client. A metric has no state: the counts of samples depend on these samples alone.
    """

    lower_is_better: ClassVar[bool | None] = False
    """Whether a smaller figure is better, as of an error. None: neither, as of a slope that is best at 1."""
    by_row: ClassVar[bool] = False
    """Whether the counts are a row for each sample, (B, ...). They are kept one after the other instead of added.

    The rows of clients then leave them: a score and a label of each of their held-out samples, say."""

    shared: ClassVar[str | None] = None
    """The name of the counts, if several metrics of a run are figures of the same ones. They are counted and sent once.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    @abstractmethod
    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the counts of samples, integers or float64. Their shape does not depend on the number of samples.

        :param logits: the model's output, (B, C) floating point.
        :param labels: the samples' classes, (B,) int64.
        """

    @abstractmethod
    def value(self, counts: Tensor) -> float:
        """Return the figure; nan if it is not defined for these samples.

        :param counts: the sum of the samples' counts, float64 on the CPU, in the shape that :meth:`count` gave them.
        """

    def curve(self, counts: Tensor) -> Mapping[str, Sequence[float]]:
        """Return the points of a curve that reports draw, ``x`` and ``y``; empty for a metric without one.

        The points of all runs correspond: point i is at the same place or of the same bin. A y that is nan is missing.

        :param counts: as for :meth:`value`.
        """
        return {}

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the counts."""
        return self.count(torch.zeros(1, self.num_classes), torch.zeros(1, dtype=torch.int64)).shape


def sign(name: str, metrics: Metrics) -> int:
    """Return 1 if more of a figure is better, -1 if less is, 0 if neither is.

    :param name: as a protocol's row has it: ``accuracy``, ``macro-f1``, ``macro-f1_mean``.
    """
    return SIGNS.get(name) or {True: -1, None: 0}.get(metrics[name.removesuffix("_mean")].lower_is_better, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Counts:
    """What is counted of a model's outputs on labelled samples. Counts of chunks, domains and clients are added."""

    total: Tensor
    """The samples of each class, (C,) int64; without classes, the number of samples, ()."""
    loss: Tensor
    """The sum of the task's loss, () float64."""
    undefined: Tensor
    """The number of undefined samples, () int64.

    The largest logit of such a sample is nan or infinite. It has no softmax, and no class is predicted for it.
    """
    correct: Tensor | None = None
    """The samples of each class that are predicted as it, (C,) int64; None without classes."""
    confusion: Tensor | None = None
    """A row per class with its samples by predicted class, (C, C) int64; None if it is not asked for."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """What each metric counts, float64. Metrics that share counts have one entry, by their name ``shared``."""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """What each metric ``by_row`` keeps of every sample, (n, ...) float64."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, *, confusion: bool = False) -> Self:
        """Count samples of classes, without the metrics.

        :param logits: the model's output, (B, C) floating point.
        :param labels: the samples' classes, (B,) int64.
        """
        classes = logits.shape[1]
        largest, predicted = logits.max(dim=1)
        defined = largest.isfinite()
        return cls(
            correct=labels[defined & (predicted == labels)].bincount(minlength=classes),
            total=labels.bincount(minlength=classes),
            loss=F.cross_entropy(logits.double(), labels, reduction="sum"),
            undefined=(~defined).sum(),
            confusion=(labels * classes + predicted)[defined].bincount(minlength=classes**2).view(classes, classes)
            if confusion
            else None,
        )

    def tensors(self) -> Tensors:
        """Return the counts as named tensors, as a client sends them."""
        own = {name: value for name, value in vars(self).items() if name not in ("metrics", "rows")}
        return flatten({"counts": own, "metrics": self.metrics, "rows": self.rows})[0]

    @classmethod
    def join(cls, tensors: Tensors) -> Self:
        """Return the counts that :meth:`tensors` split."""
        groups = unflatten(tensors)
        return cls(**groups.pop("counts"), **groups)

    @classmethod
    def received(cls, sent: Tensors, samples: int, none: Counts, metrics: Metrics) -> Self:
        """Return the counts of so many samples that a client sent.

        :param none: the counts of no samples.
        :raises ValueError: these are not such counts.
        :raises PluginContractError: a metric has no figure for them.
        """
        forms = {name: (tensor.shape, tensor.dtype) for name, tensor in none.tensors().items()}
        for name, metric in metrics.items():
            shape = torch.Size((samples, *metric.shape[1:])) if metric.by_row else metric.shape
            forms[f"{'rows' if metric.by_row else 'metrics'}/{metric.shared or name}"] = shape, torch.float64
        check_tensors(sent, forms)
        counts = cls.join(sent)
        total, undefined = counts.total.flatten().tolist(), counts.undefined.item()
        correct = [0] if counts.correct is None else counts.correct.tolist()
        classes, fits = len(total), sum(total) == samples and 0 <= undefined <= samples - sum(correct)
        if not fits or any(not 0 <= right <= held for right, held in zip(correct, total, strict=True)):
            raise ValueError(f"the counts do not fit {samples} samples of {classes} classes")
        if counts.confusion is not None:
            left = [held - sum(row) for held, row in zip(total, counts.confusion.tolist(), strict=True)]
            fits = counts.confusion.min() >= 0 and min(left) >= 0 and sum(left) == undefined
            if not (fits and counts.confusion.diagonal().tolist() == correct):
                raise ValueError(f"the confusion matrix does not match the counts of {classes} classes")
        if broken := out_of_range({**counts.metrics, **counts.rows}, most=math.inf):
            raise ValueError(f"metric {broken[0]!r} {broken[1]}")
        counts.figures(metrics)
        return counts

    def __add__(self, other: Counts) -> Self:
        theirs = other.tensors()

        def both(name: str, own: Tensor) -> Tensor:
            return torch.cat([own, theirs[name]]) if name.startswith("rows/") else own + theirs[name]

        return self.join({name: both(name, tensor) for name, tensor in self.tensors().items()})

    def rates(self, metrics: Metrics = NO_METRICS) -> dict[str, Any]:
        """Return accuracy, mean loss and accuracy per class (None for a class without samples).

        Without classes there is no accuracy. The number of ``undefined`` samples follows if there are any.

        :param metrics: the metrics that were counted, whose figures follow (None for one that is not defined).
        """
        samples, undefined = int(self.total.sum()), int(self.undefined)
        accuracy, per_class = {}, {}
        if self.correct is not None:
            by_class = zip(self.correct.tolist(), self.total.tolist(), strict=True)
            accuracy = {"accuracy": int(self.correct.sum()) / samples}
            per_class = {"per_class": [correct / total if total else None for correct, total in by_class]}
        return {
            **accuracy,
            **finite_loss(self.loss.item() / samples),
            "samples": samples,
            **per_class,
            **self.figures(metrics),
            **({"undefined": undefined} if undefined else {}),
        }

    def figures(self, metrics: Metrics) -> dict[str, float | None]:
        """Return the figures of metrics, None for one that is not finite.

        They are None if a sample is undefined: no metric defines its counts for logits without a prediction.
        """
        counts = {**self.metrics, **self.rows}
        known = {} if self.undefined else {n: metric.value(counts[metric.shared or n]) for n, metric in metrics.items()}
        return {**dict.fromkeys(metrics), **finite(known)}

    def curves(self, metrics: Metrics) -> dict[str, Any]:
        """Return the points of the metrics' curves; empty if a sample is undefined."""
        drawn, counts = () if self.undefined else metrics.items(), {**self.metrics, **self.rows}
        curves = {name: metric.curve(counts[metric.shared or name]) for name, metric in drawn}
        return {name: points for name, points in curves.items() if points}


def finite_loss(value: float) -> dict[str, Any]:
    """Return a mean loss. If it is not finite, which JSON cannot express, return None and the reason."""
    return {"loss": value} if math.isfinite(value) else {"loss": None, "loss_reason": "the loss is not finite"}
