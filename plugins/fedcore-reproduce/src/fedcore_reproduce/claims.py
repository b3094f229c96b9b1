"""What a figure of a paper claims, judged by our runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TypeAlias

from fedcore_reproduce.recipe import Claim, Recipe
from fedcore_study.tools import Difference, paired_difference

Values: TypeAlias = "Mapping[tuple[str, str], Mapping[int, float]]"
"""(row, column) -> seed -> accuracy, as fractions."""

SAME, OTHER, OPEN = "same order", "other order", "not told apart"


def sentences(recipe: Recipe, values: Values) -> list[str]:
    """Return each claim of a figure with the verdict of our runs, as far as there are some."""
    return [f"Claim: {claim.says} Here: {_verdict(recipe, claim, values)}." for claim in recipe.claims]


def _verdict(recipe: Recipe, claim: Claim, values: Values) -> str:
    """Return the verdict on each pair of a claim, with the difference in points and its 95 % interval."""
    better = _over_cells(recipe, claim, claim.better, values)
    by_order: dict[str, list[str]] = {SAME: [], OTHER: [], OPEN: []}
    for name in claim.worse:
        difference = paired_difference(better, _over_cells(recipe, claim, name, values))
        if difference:
            by_order[judge(difference)].append(f"{name} {_points(difference)}")
    parts = [f"{verdict}: {', '.join(names)}" for verdict, names in by_order.items() if names]
    return f"{claim.better} minus the others, {'; '.join(parts)}" if parts else "no seed has the runs yet"


def judge(difference: Difference) -> str:
    """Return whether the claimed order is ours: the interval of the difference has to leave out 0."""
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return OPEN
    return SAME if difference.mean > 0 else OTHER


def _over_cells(recipe: Recipe, claim: Claim, name: str, values: Values) -> dict[int, float]:
    """Return the mean over the claim's cells of a row or column by seed, for the seeds that all these cells have."""
    rows = [row.name for row in recipe.rows]
    crossing = claim.among or [column.name for column in recipe.columns] if name in rows else claim.among or rows
    cells = [values.get((name, other) if name in rows else (other, name), {}) for other in crossing]
    return {seed: fmean(cell[seed] for cell in cells) for seed in _common(cells)}


def _common(cells: Iterable[Mapping[int, float]]) -> set[int]:
    return set.intersection(*(set(cell) for cell in cells))


def _points(difference: Difference) -> str:
    text = f"{100 * difference.mean:+.2f}"
    if difference.low is None or difference.high is None:
        return text
    return f"{text} [{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"
