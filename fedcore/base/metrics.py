"""Metrics of a model on labelled samples, next to accuracy and loss: ``--metric NAME``.

Packages bring metrics by entry points of the group ``fedcore.metrics``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcore.base import registry
from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.base.identity import short_name
from fedcore.base.protocols import FIGURES, SIGNS

Metrics = Mapping[str, "Metric"]
"""The metrics of a run, by the name under which records have their figures."""

SUMS = "return sums over the samples, in float64, and divide them in value"


class Metric(ABC):
    """A figure of a model on samples, computed from counts.

    Chunks of samples are counted one by one, in threads and on clients. Their counts are added, and the sum gives the
    figure. Only counts leave a client. A metric has no state: the counts of samples depend on these samples alone.
    """

    lower_is_better: ClassVar[bool] = False
    """Whether a smaller figure is better, as of an error."""

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

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the counts."""
        return self.count(torch.zeros(1, self.num_classes), torch.zeros(1, dtype=torch.int64)).shape


def make_metrics(names: Sequence[str], num_classes: int) -> dict[str, Metric]:
    """Return the metrics of a configuration by their short names.

    :raises UnknownNameError: no installed package provides a name.
    :raises ConfigError: two metrics have the same short name, or records use a name for another figure.
    :raises PluginContractError: the object behind a name is not a metric, fails on samples, or counts no sums.
    """
    made: dict[str, Metric] = {}
    for name in names:
        metric = registry.call("metric", name, registry.resolve("metric", name), num_classes)
        if not isinstance(metric, Metric):
            expected = "a fedcore.Metric for a number of classes"
            raise PluginContractError.of(name, f"makes a {type(metric).__name__}", kind="metric", expected=expected)
        short = short_name(name)
        if short in made or short in FIGURES or short.endswith(("_mean", "_std")):
            raise ConfigError(f"metric {name!r}: the name {short!r} belongs to another figure; give it another name")
        logits, labels = torch.zeros(2, num_classes), torch.zeros(2, dtype=torch.int64)
        logits[1, -1] = 1.0  # one sample right, the other wrong
        one, other, both = (count(short, metric, logits[i], labels[i]).double() for i in ([0], [1], [0, 1]))
        if not torch.allclose(both, one + other, equal_nan=True):
            found = "counts two samples as other than the sum of both"
            raise PluginContractError.of(short, found, kind="metric", hint=SUMS)
        figure(short, metric, one.flatten().tolist())
        made[short] = metric
    return made


def sign(name: str, metrics: Metrics) -> int:
    """Return 1 if more of a figure is better, -1 if less is.

    :param name: as a protocol's row has it: ``accuracy``, ``macro-f1``, ``macro-f1_mean``.
    """
    return SIGNS.get(name) or (-1 if metrics[name.removesuffix("_mean")].lower_is_better else 1)


def count(name: str, metric: Metric, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the counts of samples.

    :raises PluginContractError: the metric raised, or it returned other than integers or float64 of its shape.
    """
    found: Any = registry.call("metric", name, metric.count, logits, labels)
    if not isinstance(found, Tensor):
        what = f"returned a {type(found).__name__}"
        raise PluginContractError.of(name, what, kind="metric", expected="a tensor of counts", hint=SUMS)
    if found.shape != metric.shape:
        what = f"returned counts of shape {tuple(found.shape)}"
        expected = f"a tensor of shape {tuple(metric.shape)} for any number of samples"
        raise PluginContractError.of(name, what, kind="metric", expected=expected)
    if found.is_floating_point() and found.dtype != torch.float64:
        what = f"returned counts of {found.dtype}"
        raise PluginContractError.of(name, what, kind="metric", expected="integers or float64", hint=SUMS)
    return found


def figure(name: str, metric: Metric, counts: Sequence[float]) -> float | None:
    """Return the figure of summed counts; None if it is not finite.

    :raises PluginContractError: the metric raised, or it returned something other than a number.
    """
    summed = torch.tensor(counts, dtype=torch.float64).view(metric.shape)
    found = registry.call("metric", name, metric.value, summed)
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        what, hint = f"returned a {type(found).__name__}", "give figures per class by the hook report of a plugin"
        raise PluginContractError.of(name, what, kind="metric", expected="a number", hint=hint) from error
    return value if math.isfinite(value) else None
