"""How evenly a model serves the clients: the figures that papers on fairness report of the clients' accuracies.

Li, Sanjabi, Beirami and Smith (q-FFL, ICLR 2020, arXiv 1905.10497) give mean, variance, worst and best 10 %; Jain,
Chiu and Hawe (DEC-TR-301, 1984) the index. All clients count alike here, whatever their samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcore_study.lenient import number

FIGURES = {
    "mean": ("clients' mean %", 100.0, 2, 1),
    "std": ("std %", 100.0, 2, -1),
    "worst": ("worst 10 %", 100.0, 2, 1),
    "best": ("best 10 %", 100.0, 2, 1),
    "variance": ("variance", 1.0, 1, -1),
    "jain": ("Jain", 1.0, 4, 1),
}
"""The figures of a :class:`Spread`, each with its heading in a table, its factor and decimals there, and 1 if more is
better or -1 if less is.
"""

PART = 0.1
"""The part of the clients that ``worst`` and ``best`` are of."""


@dataclass(frozen=True)
class Spread:
    """One run's accuracies over its clients, as fractions. A figure that the run did not record is None."""

    mean: float | None
    std: float | None
    """The population standard deviation."""
    worst: float | None
    """The mean of the lowest tenth."""
    best: float | None
    """The mean of the highest tenth."""
    jain: float | None
    """Jain's index, see :func:`jain`."""

    @property
    def variance(self) -> float | None:
        """The variance of the accuracies in percent, as in q-FFL's tables."""
        return None if self.std is None else (100 * self.std) ** 2

    @classmethod
    def of(cls, accuracies: Sequence[float]) -> Spread:
        """Summarise the clients' accuracies, at least one."""
        ordered = sorted(accuracies)
        few = max(1, round(PART * len(ordered)))
        mean, std = statistics.fmean(ordered), statistics.pstdev(ordered)
        return cls(mean, std, statistics.fmean(ordered[:few]), statistics.fmean(ordered[-few:]), jain(mean, std))


def jain(mean: float, std: float) -> float | None:
    """Return Jain's index (sum x)^2 / (n sum x^2) of n values of at least 0, which is mean^2 / (mean^2 + std^2).

    It is 1 if all values are equal, 1/n if all but one are 0, and None if all are 0.
    """
    squares = mean**2 + std**2
    return mean**2 / squares if squares else None


def spread_of(row: Mapping[str, Any]) -> Spread | None:
    """Return the spread in a protocol's figures; None if they are not by client.

    A run with more than 1,000 clients records the spread, but not the accuracy of each client.
    """
    each = row.get("per_client")
    accuracies = list(map(number, each.values())) if isinstance(each, dict) else []
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if known and len(known) == len(accuracies):
        return Spread.of(known)
    mean, std, worst, best = (number(row.get(name)) for name in ("mean", "std", "worst10", "best10"))
    if mean is None and std is None and worst is None:
        return None
    return Spread(mean, std, worst, best, None if mean is None or std is None else jain(mean, std))
