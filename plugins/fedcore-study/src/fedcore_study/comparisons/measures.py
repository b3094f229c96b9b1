"""The figure by which runs are compared: accuracy, or another figure of a protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcore import ConfigError, FedcoreError, RunConfig
from fedcore.tools import judged_by, protocols, registry, short_name
from fedcore_study.comparisons.records import NO_SIGNS, OVER_CLIENTS
from fedcore_study.lenient import mapping_in

IN_PERCENT = ("accuracy", "mean", "worst10", "best10", "std")
"""The figures of a protocol that are printed in percent."""


@dataclass(frozen=True)
class Measure:
    """A figure of a protocol."""

    name: str
    """The name in ``summary.json``: ``accuracy``, ``loss``, ``macro-f1``, ``macro-f1_mean`` over the clients."""
    sign: int = 1
    """1 if more is better, -1 if less is."""

    @classmethod
    def of(cls, name: str, signs: Mapping[str, int] = NO_SIGNS, option: str = "--metric") -> Measure:
        """Return the measure of this name, or of a metric that a run was given: ``module:study.Mae``.

        :param signs: of the figures of the runs' tasks.
        :param option: the option that names the figure.
        :raises ConfigError: no installed metric has the name, or of this one neither more nor less is better.
        """
        sign = protocols.SIGNS.get(name) or direction(name.removesuffix("_mean"), signs)
        if not sign:
            raise ConfigError(
                f"{option} {name}: it is not known whether more of it is better; choose accuracy, loss, mean, std, "
                "worst10, best10 (over clients), a metric of the runs, such as macro-f1 or macro-f1_mean, or "
                "module:MODULE.CLASS for one of yours"
            )
        return cls(short_name(name), sign)

    def best(self, values: Sequence[float]) -> float:
        """Return the best of some values."""
        return max(values, key=lambda value: self.sign * value)

    def printed(self, value: float) -> str:
        """Return a value with its unit: ``93.06 %``, ``0.1234``."""
        return f"{self.scale * value:.{self.digits}f}{self.unit}"

    @property
    def of_client(self) -> Measure:
        """The figure that each client has: AUROC of ``auroc_mean``, the accuracy of ``worst10`` or ``std``."""
        return ACCURACY if self.name in IN_PERCENT else Measure(self.name.removesuffix("_mean"), self.sign)

    @property
    def by_client(self) -> str:
        """The name of :attr:`of_client`."""
        return self.of_client.name

    def of_clients(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the figure by client in a protocol's figures; empty if the run did not record it."""
        return mapping_in(row, f"{self.by_client}_per_client") or self._of_the_first(row, "per_client")

    def of_domains(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the figure by domain in the figures of a global model; empty if the run did not record it."""
        return mapping_in(row, f"{self.by_client}_domains") or self._of_the_first(row, "domains")

    def _of_the_first(self, row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return a mapping without the name of a figure: it is of accuracy, or of the first figure of another task."""
        return mapping_in(row, name) if self.by_client == protocols.figure_of(row) else {}

    @property
    def scale(self) -> float:
        """The factor on a printed value."""
        return 100 if self.name in IN_PERCENT else 1

    @property
    def digits(self) -> int:
        """The number of printed decimal places."""
        return 2 if self.name in IN_PERCENT else 4

    @property
    def unit(self) -> str:
        """The unit of a printed value, after it; empty for none."""
        return " %" if self.name in IN_PERCENT else ""

    def signed(self, value: float) -> str:
        """Return a printed difference: ``+1.03`` points, ``-0.0213``."""
        return f"{self.scale * value:+.{self.digits}f}"


ACCURACY = Measure("accuracy")


def judge(config: RunConfig, signs: Mapping[str, int] = NO_SIGNS) -> Measure:
    """Return the figure by which a run chooses on held-out parts: its best round, and among others its options.

    :param signs: of the figures of the run's task.
    :raises ConfigError: the run does not measure it.
    """
    name = judged_by(config, signs)
    metric = next((metric for metric in config.metrics if short_name(metric) == name.removesuffix("_mean")), name)
    return Measure(name, Measure.of(metric, signs, "--best-by").sign)


def direction(name: str, signs: Mapping[str, int] = NO_SIGNS) -> int:
    """Return 1 if more of a metric is better, -1 if less is, 0 if neither is or it is not known.

    :param name: a metric, or its mean over the clients.
    :param signs: of the figures of the runs' tasks. Other metrics have to be installed.
    :raises FedcoreError: the name has a prefix, such as ``module:``, and there is no such metric.
    """
    name = name.removesuffix(OVER_CLIENTS)
    if name in signs:
        return signs[name]
    prefixed = ":" in name
    if name not in registry.available("metric") and not prefixed:
        return 0
    try:
        provider = registry.resolve("metric", name)
        metric = provider if isinstance(provider, type) else registry.call("metric", name, provider, 2)
    except FedcoreError:
        if prefixed:
            raise
        return 0
    return {False: 1, True: -1}.get(getattr(metric, "lower_is_better", False), 0)
