"""Figures over seeds: mean and sample standard deviation, paired differences with their confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedcore_study.comparisons.significance import holm, level, paired_p, seeds_needed

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
    """The mean of paired differences."""

    mean: float
    low: float | None
    """The lower bound of the confidence interval by Student's t, of this comparison alone.

    None below ``FEW`` pairs, and where the difference is the same on every seed.
    """
    high: float | None
    """The upper bound."""
    n: int
    """The number of pairs."""
    std: float | None = None
    """The sample deviation of the differences. None for one pair."""
    p: float | None = None
    """The p-value of the paired t-test, of this comparison alone. None where there is no interval."""
    corrected: float | None = None
    """The p-value, corrected by Holm for all comparisons with the baseline in the same table."""
    seeds: int | None = None
    """About how many seeds a difference of this size needs to be found. None for very many, or without a p-value."""


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> Difference | None:
    """Return values minus baseline over the seeds that both have; None where there is no such seed.

    :param confidence: probability in (0, 1) that the interval covers the true mean, were the differences normal.
    """
    figure = Figure.of([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())])
    if figure is None:
        return None
    if figure.std is None or figure.n < FEW:
        return Difference(figure.mean, None, None, figure.n, figure.std)
    from scipy.stats import t  # takes a second to import

    p = paired_p(figure.mean, figure.std, figure.n)
    if p is None:
        return Difference(figure.mean, None, None, figure.n, figure.std)
    reach = float(t.ppf((1 + confidence) / 2, figure.n - 1)) * figure.std / math.sqrt(figure.n)
    return Difference(figure.mean, figure.mean - reach, figure.mean + reach, figure.n, figure.std, p)


def corrected(differences: Mapping[str, Difference | None], confidence: float) -> dict[str, Difference | None]:
    """Return differences to one baseline with corrected p-values, and the seeds that each would need.

    Each comparison with the baseline is one hypothesis. The seeds are those for the level of Holm's first step, that
    of the smallest p-value.
    """
    tested = {name: found for name, found in differences.items() if found is not None and found.p is not None}
    p_values = holm({name: found.p for name, found in tested.items() if found.p is not None})
    first = level(confidence) / max(1, len(tested))
    made = dict(differences)
    for name, found in tested.items():
        made[name] = replace(found, corrected=p_values[name], seeds=_seeds(found, first))
    return made


def _seeds(found: Difference, alpha: float) -> int | None:
    """Return about how many seeds a difference needs to be found."""
    if not found.mean:
        return None
    needed = seeds_needed(found.mean / found.std, alpha) if found.std else FEW
    return None if needed is None else max(FEW, needed)
