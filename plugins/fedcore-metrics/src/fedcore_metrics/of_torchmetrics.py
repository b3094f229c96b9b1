"""Metrics of torchmetrics: ``--metric torchmetrics:MulticlassCohenKappa``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from fedcore import ConfigError, Metric, UnknownNameError
from fedcore_zoo import load_torchvision

load_torchvision()  # torchmetrics imports it, and it may need help
import torchmetrics  # noqa: E402
from torchmetrics import classification  # noqa: E402
from torchmetrics.utilities import dim_zero_sum  # noqa: E402

PREFIX = "Multiclass"
OWN = "in a function of your own, as the README of fedcore-metrics shows"


class OfTorchmetrics(Metric):
    """A metric of torchmetrics whose states are summed over processes (``dist_reduce_fx="sum"``).

    It gets the softmax of the logits.

    :raises ConfigError: it has other states, such as the list of all samples, or computes more than one number.
    """

    def __init__(self, metric: torchmetrics.Metric, num_classes: int) -> None:
        super().__init__(num_classes)
        self._metric = metric
        # torchmetrics has no public name for a metric's states with their reductions.
        self._states: dict[str, Tensor] = dict(metric._defaults)  # type: ignore[arg-type]
        other = [name for name, reduce in metric._reductions.items() if reduce is not dim_zero_sum]
        if other:
            raise ConfigError(
                f"metric {type(metric).__name__} keeps {other[0]!r}, which is not a sum over samples; choose a binned "
                f"form, such as MulticlassAUROC(num_classes, thresholds=200), {OWN}"
            )
        try:
            self.value(self.count(torch.eye(num_classes), torch.arange(num_classes)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"metric {type(metric).__name__} does not compute one number ({error}); choose another one, or give it "
                f"options {OWN}"
            ) from error
        higher = metric.higher_is_better
        self.lower_is_better = None if higher is None else not higher  # type: ignore[misc]

    def count(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return all states in one vector."""
        metric = copy.deepcopy(self._metric).to(logits.device)  # threads count side by side
        metric.update(logits.double().softmax(dim=1), labels)
        return torch.cat([getattr(metric, name).flatten().double() for name in self._states])

    def value(self, counts: Tensor) -> float:
        """Return the metric's figure from its states."""
        metric = copy.deepcopy(self._metric)
        parts = counts.split([state.numel() for state in self._states.values()])
        for (name, state), part in zip(self._states.items(), parts, strict=True):
            setattr(metric, name, part.view(state.shape).to(state.dtype))
        metric._update_count = 1  # else it warns that no sample was counted
        return float(metric.compute())


def by_name(name: str) -> Callable[[int], Metric]:
    """Return a metric of several classes in torchmetrics with its default options, such as ``MulticlassCohenKappa``.

    :raises UnknownNameError: torchmetrics has no such metric.
    :raises ConfigError: when the returned function is called: the metric needs options, or :class:`OfTorchmetrics`
        refuses it.
    """
    known = [known for known in classification.__all__ if known.startswith(PREFIX)]
    if name not in known:
        raise UnknownNameError("metric of torchmetrics", name, known)

    def made(num_classes: int) -> Metric:
        try:
            metric = getattr(classification, name)(num_classes=num_classes)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"metric {name} cannot be made without options ({error}); give them {OWN}") from error
        return OfTorchmetrics(metric, num_classes)

    return made
