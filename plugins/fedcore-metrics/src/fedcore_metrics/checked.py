"""The metrics of a run: made by their names, and checked whenever they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcore import ConfigError, Metric, PluginContractError
from fedcore.tools import protocols, registry, short_name

SUMS = "return sums over the samples, in float64, and divide them in value"


class Checked(Metric):
    """Somebody's metric. What it does wrong is an error that names it."""

    def __init__(self, name: str, metric: Metric, num_classes: int) -> None:
        super().__init__(num_classes)
        self.name, self._metric = name, metric
        self.lower_is_better, self.by_row = metric.lower_is_better, metric.by_row  # type: ignore[misc] # of this object
        self.shared = metric.shared  # type: ignore[misc] # of this object

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the counts of samples in float64, in which sums of integers are exact up to 2^53.

        :raises PluginContractError: the metric raised, or it returned other than integers or float64 of its shape.
        """
        counts: Any = registry.call("metric", self.name, self._metric.count, logits, labels)
        if not isinstance(counts, Tensor):
            raise self._broken(f"returned a {type(counts).__name__}", expected="a tensor of counts", hint=SUMS)
        shape = (len(labels), *self._metric.shape[1:]) if self.by_row else tuple(self._metric.shape)
        if counts.shape != shape:
            expected = f"a tensor of shape {shape} for any number of samples"
            raise self._broken(f"returned counts of shape {tuple(counts.shape)}", expected=expected)
        if counts.is_floating_point() and counts.dtype != torch.float64:
            raise self._broken(f"returned counts of {counts.dtype}", expected="integers or float64", hint=SUMS)
        return counts.double()

    def value(self, counts: Tensor) -> float:
        """Return the figure of summed counts.

        :raises PluginContractError: the metric raised, or it returned something other than a number.
        """
        figure = registry.call("metric", self.name, self._metric.value, counts)
        try:
            return float(figure)
        except (TypeError, ValueError, RuntimeError) as error:
            hint = "give figures per class by the hook report of a plugin"
            raise self._broken(f"returned a {type(figure).__name__}", expected="a number", hint=hint) from error

    def curve(self, counts: Tensor) -> Mapping[str, Sequence[float]]:
        """Return the metric's curve.

        :raises PluginContractError: the metric raised.
        """
        points: Mapping[str, Sequence[float]] = registry.call("metric", self.name, self._metric.curve, counts)
        return points

    def try_samples(self, others: dict[str, Tensor]) -> None:
        """Count two samples.

        :param others: what earlier metrics counted, by the names of their counts. The metric's own are added.
        :raises PluginContractError: the metric fails, counts no sums, or counts other than one that shares its counts.
        """
        logits, labels = torch.zeros(2, self.num_classes), torch.zeros(2, dtype=torch.int64)
        logits[1, -1] = 1.0  # one sample right, the other wrong
        one, other, both = (self.count(logits[i], labels[i]) for i in ([0], [1], [0, 1]))
        if not torch.allclose(both, torch.cat([one, other]) if self.by_row else one + other, equal_nan=True):
            raise self._broken("counts two samples as other than the sum of both", hint=SUMS)
        first = others.setdefault(self.shared or self.name, both)
        if first is not both and not (first.shape == both.shape and torch.allclose(first, both, equal_nan=True)):
            hint = "count the same in both, or give them other names of counts"
            raise self._broken(f"counts other than an earlier metric with shared={self.shared!r}", hint=hint)
        self.value(one)

    def _broken(self, fault: str, **more: str) -> PluginContractError:
        return PluginContractError.of(self.name, fault, kind="metric", **more)  # type: ignore[arg-type]


def make_metrics(names: Sequence[str], num_classes: int) -> dict[str, Metric]:
    """Return the metrics of a configuration by their short names.

    :raises UnknownNameError: no installed package provides a name.
    :raises ConfigError: two metrics have the same short name, or records use a name for another figure.
    :raises PluginContractError: the object behind a name is not a metric, fails on samples, or counts no sums.
    """
    metrics: dict[str, Metric] = {}
    counts: dict[str, Tensor] = {}
    for name in names:
        metric = registry.call("metric", name, registry.resolve("metric", name), num_classes)
        if not isinstance(metric, Metric):
            expected = "a fedcore.Metric for a number of classes"
            raise PluginContractError.of(name, f"makes a {type(metric).__name__}", kind="metric", expected=expected)
        short = short_name(name)
        if short in metrics or short in protocols.FIGURES or short.endswith(protocols.OF_METRIC):
            raise ConfigError(f"metric {name!r}: the name {short!r} belongs to another figure; give it another name")
        checked = Checked(short, metric, num_classes)
        checked.try_samples(counts)
        metrics[short] = checked
    return metrics
