"""Charts of lines: accuracy over rounds, bytes and virtual time, loss terms, plugins' figures. Imports no torch.

A line is the mean over seeds up to the last round that all runs of a row have. Values come from files of runs. A value
that is not a finite number is treated as missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from fedcore.tools import PROTOCOLS, flat
from fedcore_report.charts import BANDS, Curves, Line, Omitted, plain
from fedcore_study.tools import Group, Measure, RunRecord, list_in, mapping_in, number

Points: TypeAlias = "Callable[[RunRecord], dict[int, float]]"

MB = 1e6

CURVES = {
    "auroc": ("ROC curve", "false positive rate", "true positive rate", "Dashed: chance. "),
    "ece": ("Reliability diagram", "confidence", "accuracy", "Below the dashed diagonal a model is too sure. "),
}
"""The curves of known metrics: title, axes and a sentence."""


def over_rounds(group: Group, colors: Mapping[str, int], protocol: str) -> Curves | None:
    """Return the compared figure over rounds under a protocol; None for fewer than two evaluations, which make no line.

    :param colors: the number of each row's colour.
    """
    lines = lines_of(group, colors, values(protocol))
    if not lines:
        return None
    measure = measure_of(group)
    name = named(measure)
    return Curves(
        name=f"learning-{protocol}",
        title=f"{name} over rounds, {protocol}",
        about=f"{name} of {PROTOCOLS[protocol].measures}. {how(lines)}",
        x_title="round",
        y_title=f"{measure.name}{measure.unit}",
        lines=lines,
    )


def against_costs(group: Group, colors: Mapping[str, int], protocol: str) -> Iterator[Curves]:
    """Yield the compared figure against bytes, and against virtual time if a simulated system recorded it."""
    measure = measure_of(group)
    figure = named(measure)
    spent = "the bytes that all clients received and sent until then"
    for name, title, x_title, places, axis in (
        ("bytes", "bytes", "MB sent, down and up", megabytes, spent),
        ("time", "virtual time", "virtual seconds", virtual_seconds, "the clock of the simulated system (--system)"),
    ):
        if lines := lines_of(group, colors, values(protocol), places):
            yield Curves(
                name=f"{measure.name}-{name}",
                title=f"{figure} against {title}, {protocol}",
                about=f"{figure} of {PROTOCOLS[protocol].measures} over {axis}. {how(lines)}",
                x_title=x_title,
                y_title=f"{measure.name}{measure.unit}",
                lines=lines,
                rounds=False,
            )


def of_metrics(group: Group, colors: Mapping[str, int], protocol: str) -> Iterator[Curves]:
    """Yield the curves that metrics draw of a protocol's counts at the end: ROC curves, reliability diagrams."""
    curves: dict[str, dict[str, list[dict[int, tuple[float, float]]]]] = {}
    for label, runs in group.rows.items():
        for run in runs:
            drawn = mapping_in(run.summary or {}, f"curves_{'global_local' if lent(run, protocol) else protocol}")
            for name in drawn:
                xs, ys = (map(number, list_in(mapping_in(drawn, name), axis)) for axis in ("x", "y"))
                pairs = enumerate(zip(xs, ys, strict=False))
                points = {place: (x, y) for place, (x, y) in pairs if x is not None and y is not None}
                curves.setdefault(name, {}).setdefault(label, []).extend([points] if points else [])
    for name, rows in curves.items():
        title, x_title, y_title, about = CURVES.get(name, (f"Curve of {plain(name)}", "x", "y", ""))
        lines = [mean_line(label, colors[label], points) for label, points in rows.items() if points]
        if lines := [line for line in lines if len(line.x) > 1]:
            yield Curves(
                name=f"curve-{name}-{protocol}",
                title=f"{title}, {protocol}",
                about=f"Of {PROTOCOLS[protocol].measures}, all samples together. {about}{how(lines)}",
                x_title=x_title,
                y_title=y_title,
                lines=lines,
                rounds=False,
                diagonal=name in CURVES,
            )


def lent(run: RunRecord, protocol: str) -> bool:
    """Return whether a run's figures under a protocol are its global model's on the same samples."""
    return run.lent and protocol == "personal"


def losses(group: Group, colors: Mapping[str, int]) -> Iterator[Curves | Omitted]:
    """Yield the loss terms over rounds, the task's first."""
    runs = [run for runs in group.rows.values() for run in runs]
    terms = dict.fromkeys(term for run in runs for line in run.rounds for term in mapping_in(line, "losses"))
    drawn = 0
    for term in sorted(terms, key=lambda term: (term != "task", term)):
        points = in_rounds(lambda line, term=term: mapping_in(line, "losses").get(term))  # type: ignore[misc]
        if lines := lines_of(group, colors, points):
            drawn += 1
            plugin, dot, name = term.rpartition(".")
            yield Curves(
                name=f"loss-{term}",
                title=f"Loss term {plain(name)} of {plain(plugin)}" if dot else f"Loss of the {plain(term)}",
                about=f"Mean over the clients' steps of a round, as recorded. {how(lines)}",
                x_title="round",
                y_title="loss",
                lines=lines,
                log=_far_apart(lines),
            )
    if not drawn:
        yield Omitted("Loss terms", "fewer than two rounds are recorded")


def reported(group: Group, colors: Mapping[str, int]) -> Iterator[Curves]:
    """Yield the figures that plugins report in each round, such as a privacy budget or the measures of diagnostics."""
    runs = [run for runs in group.rows.values() for run in runs]
    names = dict.fromkeys(name for run in runs for line in run.rounds for name in _reports(line))
    for name in names:
        points = in_rounds(lambda line, name=name: _reports(line).get(name))  # type: ignore[misc]
        if lines := lines_of(group, colors, points):
            plugin, _, figure = name.partition(".")
            yield Curves(
                name=f"reported-{name}",
                title=f"{plain(figure)}, reported by {plain(plugin)}",
                about=f"The card of {plain(plugin)} says what it is. {how(lines)}",
                x_title="round",
                y_title=plain(figure),
                lines=lines,
            )


def _reports(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that plugins reported in a round, by plugin and name."""
    return dict(flat(mapping_in(line, "reports"), "."))


def lines_of(group: Group, colors: Mapping[str, int], points: Points, places: Points | None = None) -> list[Line]:
    """Return a line per row, see :func:`mean_line`; empty if no line has two points.

    :param points: returns a run's values by the number of rounds after which they were taken.
    :param places: returns a run's places on the x axis by number of rounds, such as the bytes sent until then. The
        default is the number of rounds. Runs are averaged round by round, in x and in y. A round without a place is
        left out.
    """
    lines = []
    for label, runs in group.rows.items():
        of_runs = []
        for run in runs:
            values = points(run)
            where = {rounds: float(rounds) for rounds in values} if places is None else places(run)
            if kept := {rounds: (where[rounds], value) for rounds, value in values.items() if rounds in where}:
                of_runs.append(kept)
        if of_runs:
            lines.append(mean_line(label, colors[label], of_runs))
    return lines if any(len(xs) > 1 for line in lines for xs, _ in line.parts) else []


def mean_line(label: str, color: int, points: Sequence[Mapping[int, tuple[float, float]]]) -> Line:
    """Return the mean of runs up to their last common round, with the rest of single runs as tails.

    :param points: each run's points (x, y) by the number of rounds after which they were taken.
    """
    shared = sorted(set.intersection(*(set(values) for values in points)))
    end = shared[-1] if shared else 0
    beyond = [sorted(rounds for rounds in values if rounds >= end) for values in points]
    tails = [
        ([values[r][0] for r in rounds], [values[r][1] for r in rounds])
        for rounds, values in zip(beyond, points, strict=True)
        if rounds and rounds[-1] > end
    ]
    xs, ys = ([[values[r][part] for values in points] for r in shared] for part in (0, 1))
    std = [statistics.stdev(column) for column in ys] if len(points) > 1 else []
    x, y = ([statistics.fmean(column) for column in columns] for columns in (xs, ys))
    return Line(label, color, x, y, std, len(points), tails)


def how(lines: Sequence[Line]) -> str:
    """Explain the lines of a chart."""
    parts = []
    if any(line.runs > 1 for line in lines):
        band = ", the band one standard deviation" if len(lines) <= BANDS else ""
        parts.append(f"The line is the mean over seeds{band}.")
    if any(line.tails for line in lines):
        parts.append("Dotted are single runs beyond the last round that all of the row have.")
    return " ".join(parts)


def in_rounds(read: Callable[[Mapping[str, Any]], Any]) -> Points:
    """Return a function that reads a run's figure by the number of rounds after which it was taken."""

    def points(run: RunRecord) -> dict[int, float]:
        values = ((line["round"] + 1, number(read(line))) for line in run.rounds)
        return {rounds: value for rounds, value in values if value is not None}

    return points


def values(protocol: str) -> Points:
    """Return a function that reads a run's compared figure under a protocol as it is printed, by number of rounds."""

    def points(run: RunRecord) -> dict[int, float]:
        scale = Measure(run.figure).scale
        return {point.rounds: scale * point.value for point in run.curve(protocol)}

    return points


def measure_of(group: Group) -> Measure:
    """Return the figure by which the runs of a group are compared: accuracy, or the first of their task."""
    run = next(run for runs in group.rows.values() for run in runs)
    return Measure.of(run.figure, run.signs)


def named(measure: Measure) -> str:
    """Return the name of a figure for the beginning of a sentence."""
    return {"auroc": "AUROC", "ece": "ECE"}.get(measure.name, measure.name[0].upper() + measure.name[1:])


def megabytes(run: RunRecord) -> dict[int, float]:
    """Return the MB sent down and up together after each number of rounds."""
    spent = accumulate(line["bytes"]["down"] + line["bytes"]["up"] for line in run.rounds)
    return {line["round"] + 1: total / MB for line, total in zip(run.rounds, spent, strict=True)}


virtual_seconds = in_rounds(lambda line: line.get("virtual_time"))


def _far_apart(lines: Sequence[Line]) -> bool:
    """Return whether all values are positive, and so different that a linear axis would show only the largest."""
    values = [y for line in lines for _, ys in line.parts for y in ys]
    return bool(values) and min(values) > 0 and max(values) > 1000 * statistics.median(values)
