"""How evenly a model serves the clients: the figures that papers on fairness report of the clients' accuracies.

They are the same of another figure, such as the clients' AUROC.

Li, Sanjabi, Beirami and Smith (q-FFL, ICLR 2020, arXiv 1905.10497) give mean, variance, worst and best 10 %; Jain,
Chiu and Hawe (DEC-TR-301, 1984) the index. All clients count alike here, whatever their samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedcore_study.comparisons.measures import Measure
from fedcore_study.lenient import number

FIGURES = ("mean", "std", "worst", "best", "variance", "jain")
"""The figures of a :class:`Spread`."""


def headings(measure: Measure) -> dict[str, tuple[str, float, int, int]]:
    """Return the figures of a spread that a table shows: heading, factor, decimals, 1 if more is better or -1 if less.

    The variance is that of accuracies.
    """
    own = measure.of_client
    name, factor, digits, sign, unit = own.name, own.scale, own.digits, own.sign, own.unit
    shown = {
        "mean": (f"clients' mean{unit}" if name == "accuracy" else f"clients' {name}", factor, digits, sign),
        "std": (f"std{unit}", factor, digits, -1),
        "worst": ("worst 10 %", factor, digits, sign),
        "best": ("best 10 %", factor, digits, sign),
        "variance": ("variance", 1.0, 1, -1),
        "jain": ("Jain", 1.0, 4, 1),
    }
    if name != "accuracy":
        del shown["variance"]
    return shown


@dataclass(frozen=True)
class Spread:
    """One run's figures over its clients, accuracies as fractions. What the run did not record is None."""

    mean: float | None
    std: float | None
    """The population standard deviation."""
    worst: float | None
    """The mean of the worst tenth."""
    best: float | None
    """The mean of the best tenth."""

    @classmethod
    def of(cls, row: Mapping[str, Any], measure: Measure) -> Spread:
        """Return the spread of a figure over the clients in a protocol's figures."""
        if measure.by_client == "accuracy":
            return cls(*(number(row.get(name)) for name in ("mean", "std", "worst10", "best10")))
        mean, std = (number(row.get(f"{measure.by_client}_{part}")) for part in ("mean", "std"))
        values = [value for value in map(number, measure.of_clients(row).values()) if value is not None]
        ordered, tenth = sorted(values, key=lambda value: measure.sign * value), max(1, round(0.1 * len(values)))
        ends = (fmean(ordered[:tenth]), fmean(ordered[-tenth:])) if values else (None, None)
        return cls(mean, std, *ends)

    @property
    def variance(self) -> float | None:
        """The variance of the accuracies in percent, as in q-FFL's tables."""
        return None if self.std is None else (100 * self.std) ** 2

    @property
    def jain(self) -> float | None:
        """Jain's index (sum x)^2 / (n sum x^2) of n values of at least 0, which is mean^2 / (mean^2 + std^2).

        It is 1 if all values are equal, 1/n if all but one are 0, and None if all are 0.
        """
        if self.mean is None or self.std is None or not self.mean:
            return None
        return self.mean**2 / (self.mean**2 + self.std**2)
