"""Figures over seeds: mean and sample standard deviation, paired differences with their confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEW = 3
"""Below so many pairs of seeds there is no interval: of two, Student's t multiplies their deviation by nine."""


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (n - 1; None for one value) of ``n`` values."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        """Summarise values; None where there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with its confidence interval by Student's t (None below ``FEW`` pairs)."""

    mean: float
    low: float | None
    high: float | None
    n: int


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> Difference | None:
    """Return values minus baseline over the seeds that both have; None where there is no such seed.

    :param confidence: probability in (0, 1) that the interval covers the true mean, were the differences normal.
    """
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    figure = Figure.of(differences)
    if figure is None:
        return None
    if figure.std is None or figure.n < FEW:
        return Difference(figure.mean, None, None, figure.n)
    from scipy.stats import t  # takes a second to import

    reach = float(t.ppf((1 + confidence) / 2, figure.n - 1)) * figure.std / math.sqrt(figure.n)
    return Difference(figure.mean, figure.mean - reach, figure.mean + reach, figure.n)
