"""How evenly a model serves the clients: the figures that papers on fairness report of the clients' accuracies.

Li, Sanjabi, Beirami and Smith (q-FFL, ICLR 2020, arXiv 1905.10497) give mean, variance, worst and best 10 %; Jain,
Chiu and Hawe (DEC-TR-301, 1984) the index. All clients count alike here, whatever their samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PART = 0.1
"""The part of the clients in the worst and the best ones."""


@dataclass(frozen=True)
class Spread:
    """One run's accuracies over its clients, fractions; None where the run recorded no accuracy by client.

    :param std: population standard deviation. ``worst`` and ``best``: means of the lowest and highest tenth.
    :param jain: Jain's index, see :func:`jain`.
    """

    mean: float | None
    std: float | None
    worst: float | None
    best: float | None
    jain: float | None

    @property
    def variance(self) -> float | None:
        """The variance of accuracies in percent, as q-FFL's tables have it."""
        return None if self.std is None else (100 * self.std) ** 2

    @classmethod
    def of(cls, accuracies: Sequence[float]) -> Spread:
        """Summarise the clients' accuracies, at least one."""
        ordered = sorted(accuracies)
        few = max(1, round(PART * len(ordered)))
        mean = statistics.fmean
        return cls(mean(ordered), statistics.pstdev(ordered), mean(ordered[:few]), mean(ordered[-few:]), jain(ordered))


def jain(values: Sequence[float]) -> float | None:
    """Return (sum x)^2 / (n sum x^2) of n values of at least 0: 1 where all are equal, 1/n where one has everything.

    None where all are 0.
    """
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else None


def spread_of(row: Mapping[str, Any]) -> Spread | None:
    """Return the spread that a protocol's figures in a run's records give; None where they are not by client.

    Beyond 1,000 clients a run records deviation and worst 10 % alone.
    """
    each = row.get("per_client")
    accuracies = list(map(_fraction, each.values())) if isinstance(each, dict) else []
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if known and len(known) == len(accuracies):
        return Spread.of(known)
    std, worst = _fraction(row.get("std")), _fraction(row.get("worst10"))
    return None if std is None and worst is None else Spread(None, std, worst, None, None)


def _fraction(value: Any) -> float | None:
    """Return a number in [0, 1] from a file, else None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return float(value) if usable else None
