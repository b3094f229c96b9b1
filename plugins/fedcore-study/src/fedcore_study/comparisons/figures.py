"""Figures over seeds: mean and sample standard deviation, paired differences with their confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fedcore_study.comparisons.measures import Measure
from fedcore_study.comparisons.significance import holm, level, paired_p, seeds_needed

FEW = 3
"""The least number of pairs of seeds for an interval. For two, Student's t multiplies their deviation by nine."""


@dataclass(frozen=True)
class Figure:
    """The mean of ``n`` values and their sample standard deviation (n - 1), which is None for one value."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure | None:
        """Summarise the values that are not None; None if all are."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences."""

    mean: float
    low: float | None
    """The lower bound of the confidence interval by Student's t, of this comparison alone.

    None for fewer than ``FEW`` pairs, and if the difference is the same on every seed.
    """
    high: float | None
    """The upper bound."""
    n: int
    """The number of pairs."""
    std: float | None = None
    """The sample deviation of the differences. None for one pair."""
    p: float | None = None
    """The p-value of the paired t-test, of this comparison alone. None without an interval."""
    corrected: float | None = None
    """The p-value, corrected by Holm for all comparisons with the baseline in the same table."""
    seeds: int | None = None
    """About how many seeds are needed to find a difference of this size. None for very many, or without a p-value."""

    def text(self, measure: Measure) -> str:
        """Return the difference with its interval: ``+1.03 [+0.41, +1.66]``."""
        text = measure.signed(self.mean)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{measure.signed(self.low)}, {measure.signed(self.high)}]"


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> Difference | None:
    """Return values minus baseline over the seeds that both have; None if there is no such seed.

    :param confidence: the probability in (0, 1) that the interval covers the true mean if the differences are normal.
    """
    figure = Figure.of([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())])
    if figure is None:
        return None
    if figure.std is None or figure.n < FEW or (p := paired_p(figure.mean, figure.std, figure.n)) is None:
        return Difference(figure.mean, None, None, figure.n, figure.std)
    from scipy.stats import t  # takes a second to import

    reach = float(t.ppf((1 + confidence) / 2, figure.n - 1)) * figure.std / math.sqrt(figure.n)
    return Difference(figure.mean, figure.mean - reach, figure.mean + reach, figure.n, figure.std, p)


def corrected(differences: Mapping[str, Difference | None], confidence: float) -> dict[str, Difference | None]:
    """Return differences to one baseline with corrected p-values, and the number of seeds that each needs.

    Each comparison with the baseline is one hypothesis. The number of seeds is for the level of Holm's first step,
    which is applied to the smallest p-value.
    """
    p_values = holm(
        {name: difference.p for name, difference in differences.items() if difference and difference.p is not None}
    )
    first = level(confidence) / max(1, len(p_values))
    completed = dict(differences)
    for name, difference in differences.items():
        if difference and name in p_values:
            seeds = seeds_needed(difference.mean / difference.std, first) if difference.std else None
            completed[name] = replace(difference, corrected=p_values[name], seeds=seeds and max(FEW, seeds))
    return completed
