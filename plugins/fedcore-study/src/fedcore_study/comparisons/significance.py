"""Tests of differences: paired t, Holm's correction, the seeds that a difference needs, ranks over data sets.

scipy and pandas are imported where they are needed: they take a second.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

POWER = 0.8
"""The probability with which :func:`seeds_needed` seeds show an existing difference."""

MOST_SEEDS = 1000
"""The largest number of seeds that is worth telling."""

ROUNDING = 1e-9
"""Means and deviations of accuracies below this are rounding errors of 0."""

_LARGEST = 10.0
"""Larger effects need no more seeds than this one; the noncentral t distribution is not exact for them."""


def paired_p(mean: float, deviation: float, n: int) -> float | None:
    """Return the two-sided p-value of the paired t-test, from the mean and sample deviation of ``n`` differences.

    :returns: None if all differences are the same and not 0: without a deviation there is no test.
    """
    from scipy.stats import t

    if deviation < ROUNDING:
        return 1.0 if abs(mean) < ROUNDING else None
    return float(2 * t.sf(abs(mean) / (deviation / math.sqrt(n)), n - 1))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values corrected for their number by Holm's step-down method (1979)."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def seeds_needed(effect: float, alpha: float) -> int | None:
    """Return the number of seeds with which the paired t-test finds an effect with a probability of ``POWER``.

    :param effect: the mean of the paired differences divided by their deviation.
    :param alpha: the level of the two-sided test.
    :returns: None for more than ``MOST_SEEDS``.
    """
    effect = min(abs(effect), _LARGEST)
    numbers = range(2, MOST_SEEDS + 1)  # the power grows with the number
    place = bisect.bisect_left(numbers, POWER, key=lambda n: power(effect, n, alpha))
    return numbers[place] if place < len(numbers) else None


def power(effect: float, n: int, alpha: float) -> float:
    """Return the probability that a two-sided paired t-test over ``n`` pairs finds an effect, in its own direction."""
    from scipy.stats import nct, t

    return float(nct.sf(t.ppf(1 - alpha / 2, n - 1), n - 1, abs(effect) * math.sqrt(n)))


def level(confidence: float) -> float:
    """Return the level of the tests that belong to intervals: 0.05 for 0.95."""
    return round(1 - confidence, 12)


@dataclass(frozen=True)
class Ranks:
    """Methods ranked on each of several data sets (Demsar 2006, JMLR 7:1-30)."""

    tables: int
    """The number of data sets, or of other splits of one."""
    average: dict[str, float]
    """Each method's average rank; 1 is the best."""
    p: float
    """The p-value of Friedman's test that all methods are alike."""
    critical: float
    """Nemenyi's critical difference: average ranks that differ by less are not significantly different."""
    alpha: float
    """The level of both tests."""
    each: dict[str, list[float]]
    """Each method's rank on each data set."""
    left_out: list[str]
    """The methods that some data sets do not have."""

    @property
    def different(self) -> bool:
        """Whether Friedman's test finds a difference. Nemenyi's test follows only then."""
        return self.p < self.alpha

    @property
    def verdict(self) -> str:
        """The results of the tests, and the methods that they leave out, in sentences."""
        rest = f" Not ranked, for not every setting has them: {', '.join(self.left_out)}." if self.left_out else ""
        if not self.different:
            return f"Friedman's test finds no difference between the methods ({p_text(self.p)}).{rest}"
        return (
            f"Friedman's test finds a difference ({p_text(self.p)}). Average ranks that differ by less than "
            f"{self.critical:.2f} are not significantly different (Nemenyi).{rest}"
        )

    def __str__(self) -> str:
        """Return the average ranks and the results of the tests in sentences."""
        each = ", ".join(f"{name} {rank:.2f}" for name, rank in sorted(self.average.items(), key=lambda item: item[1]))
        return f"Average ranks over {self.tables} data settings, 1 is the best: {each}. {self.verdict}"


def ranked(tables: Sequence[Mapping[str, float]], alpha: float) -> Ranks | None:
    """Rank the methods that all tables have, by figures that are better if they are larger.

    Friedman's test is approximate: with few tables it misses differences.

    :returns: None for fewer than two tables or three methods.
    """
    if len(tables) < 2 or min(map(len, tables)) < 3:
        return None
    import pandas
    from scipy.stats import friedmanchisquare, studentized_range

    methods = pandas.DataFrame(tables)
    complete = methods.dropna(axis="columns")
    count = len(complete.columns)
    if count < 3:
        return None
    ranks = complete.rank(axis="columns", ascending=False)
    alike = bool((ranks.nunique(axis="columns") == 1).all())
    p = 1.0 if alike else float(friedmanchisquare(*(complete[name] for name in complete)).pvalue)
    quantile = float(studentized_range.ppf(1 - alpha, count, math.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(count * (count + 1) / (6 * len(tables)))
    left_out = [name for name in methods if name not in complete]
    return Ranks(len(tables), ranks.mean().to_dict(), p, critical, alpha, ranks.to_dict("list"), left_out)


def p_text(p: float) -> str:
    """Return a p-value as papers print it: ``p = 0.012``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
