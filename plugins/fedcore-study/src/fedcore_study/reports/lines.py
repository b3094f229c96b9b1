"""Runs into lines of a chart: the mean over seeds as far as all runs of a row came, what single ones have beyond.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fedcore_study.comparisons.groups import Group
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.reports.charts import Line, number
from fedcore_study.reports.reading import mapping_in

Read: TypeAlias = "Callable[[Mapping[str, Any]], float | None]"
Points: TypeAlias = "Callable[[RunRecord], dict[int, float]]"


def lines_of(group: Group, colors: Mapping[str, int], points: Points, places: Points | None = None) -> list[Line]:
    """Return a line per row: the mean as far as all of its runs came, what single ones have beyond as tails.

    :param points: a run's values by the number of rounds after which they were taken.
    :param places: where on the x axis a run is after so many rounds, such as the bytes sent until then: runs are
        averaged round by round, in x as in y. Default the rounds themselves. A round without a place is left out.
    """
    lines = []
    for label, runs in group.rows.items():
        found = []
        for run in runs:
            values = points(run)
            where = {rounds: float(rounds) for rounds in values} if places is None else places(run)
            if kept := {rounds: (where[rounds], value) for rounds, value in values.items() if rounds in where}:
                found.append(kept)
        if not found:
            continue
        shared = sorted(set.intersection(*(set(values) for values in found)))
        end = shared[-1] if shared else 0
        beyond = [sorted(rounds for rounds in values if rounds >= end) for values in found]
        tails = [
            ([values[r][0] for r in rounds], [values[r][1] for r in rounds])
            for rounds, values in zip(beyond, found, strict=True)
            if rounds and rounds[-1] > end
        ]
        xs, ys = ([[values[r][part] for values in found] for r in shared] for part in (0, 1))
        std = [statistics.stdev(column) for column in ys] if len(found) > 1 else []
        x, y = ([statistics.fmean(column) for column in columns] for columns in (xs, ys))
        lines.append(Line(label, colors[label], x, y, std, len(found), tails))
    return lines


def over_rounds(run: RunRecord, read: Read) -> dict[int, float]:
    """Return a figure by the number of rounds after which it was taken."""
    found = ((line["round"] + 1, read(line)) for line in run.rounds)
    return {rounds: value for rounds, value in found if value is not None}


def how(lines: Sequence[Line]) -> str:
    """Return how the lines of a chart are to be read."""
    parts = []
    if any(line.runs > 1 for line in lines):
        parts.append("The line is the mean over seeds, the band one standard deviation.")
    if any(line.tails for line in lines):
        parts.append("Dotted are single runs beyond the last round that all of the row have.")
    return " ".join(parts)


def figure_of(line: Mapping[str, Any], protocol: str, name: str) -> float | None:
    """Return a protocol's figure in a round's record."""
    return number(mapping_in(mapping_in(line, "metrics"), protocol).get(name))


def scaled(value: float | None, factor: float) -> float | None:
    """Return a value times a factor, None for none."""
    return None if value is None else factor * value
