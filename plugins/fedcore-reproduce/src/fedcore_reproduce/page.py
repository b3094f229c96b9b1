"""Tables of a Markdown page that are made from a folder of evidence, between markers that name a table or figure.

<!-- results: fedproc-table-2-paper -->
... replaced by the command ...
<!-- end of results -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fedcore import ConfigError, UnknownNameError
from fedcore_report import Curves
from fedcore_reproduce.claims import sentences
from fedcore_reproduce.collect import changed_since
from fedcore_reproduce.curves import across, chart, final
from fedcore_reproduce.evidence import Evidence, slug
from fedcore_reproduce.places import Cells
from fedcore_reproduce.recipe import SCALES, Printed, Recipe, Row
from fedcore_study.tools import FEW, Difference, Figure, Table, counted, paired_difference, spread

BASELINE = "FedAvg"
"""The row that the others are compared with, in upper or lower case."""

LATE = 3
"""The number of last evaluations that a mean is shown of."""

END = "<!-- end of results -->"
_MARKER = re.compile(r"<!-- results: (\S+) -->\n(.*?)" + re.escape(END), re.DOTALL)
_BEGIN = "<!-- results:"


def marker(name: str) -> str:
    """Return the line that a table's place on a page begins with."""
    return f"{_BEGIN} {name} -->"


def _tables(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    """Return tables and figures by the names of their folders of evidence, which the markers on the page have."""
    return {recipe.folder(scale): recipe for recipe in recipes for scale in SCALES}


def filled(page: str, results: Sequence[Evidence], recipes: Sequence[Recipe], among: Cells) -> str:
    """Return a page with the tables between its markers made anew.

    :param among: the recipes' cells as they are now; a note names runs that were configured otherwise.
    :raises UnknownNameError: a marker names a table that has no recipe.
    :raises ConfigError: a marker has no end, or evidence names a row or column that its table does not have.
    """
    if page.count(_BEGIN) != len(_MARKER.findall(page)):
        raise ConfigError(f"a line {_BEGIN} TABLE --> has no line {END} after it")
    tables = _tables(recipes)

    def made(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise UnknownNameError("table in a marker", name, tables)
        text = block(tables[name], name, [run for run in results if run.folder == name], among)
        return f"{marker(name)}\n\n{text}\n\n{END}"

    return _MARKER.sub(made, page)


def unplaced(page: str, results: Iterable[Evidence]) -> list[str]:
    """Return the tables that there is evidence for and no marker."""
    named = {match[1] for match in _MARKER.finditer(page)}
    return sorted({evidence.folder for evidence in results if evidence.place} - named)


def block(recipe: Recipe, name: str, results: Sequence[Evidence], among: Cells) -> str:
    """Return a table's text: for each column that has runs the figures, a picture of the curves, and what to know."""
    _check_places(recipe, results)
    columns = by_column(recipe, results)
    scale = name.rpartition("-")[2]
    flag = "" if scale == "quick" else f" --scale {scale}"
    lines = [f"{recipe.label} of {recipe.source}: {recipe.title}.", ""]
    lines += [f"    {recipe.command}{flag}", ""]
    if not results:
        return "\n".join([*lines, "No run of it has been recorded yet."])
    if recipe.axis:
        lines += _panels(recipe, name, results)
        columns = {}
    for column, evidence in columns.items():
        lines += [column_table(recipe, column, evidence), ""]
        missing = [row.name for row in recipe.rows if not _runs_of(row, evidence)]
        if missing:
            lines += [f"Rows without runs so far: {', '.join(missing)}.", ""]
        alt = f"{recipe.label} of {recipe.method}'s paper, {column}: test accuracy over rounds"
        lines += [f"![{alt}]({picture_name(name, column)})", ""]
    if empty := sum(column not in by_column(recipe, results) for column in (part.name for part in recipe.columns)):
        lines += [f"Columns without runs so far: {empty} of {len(recipe.columns)}.", ""]
    notes = sentences(recipe, values_of(recipe, results))
    notes += [f"{curve.name}: {curve.source}." for curve in recipe.curves if curve.column in columns]
    notes += [*_changed(results, among), *_corrected(columns), _origin(name, results)]
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def _panels(recipe: Recipe, name: str, results: Sequence[Evidence]) -> list[str]:
    """Return a figure with an x axis: for each panel that has runs, a table of our figures and the picture."""
    lines = []
    values = values_of(recipe, results)
    for panel, columns in panels(recipe, results).items():
        rows = [
            [row.name, *(spread(Figure.of(values.get((row.name, column), {}).values()), 100) for column in columns)]
            for row in recipe.rows
            if any((row.name, column) in values for column in columns)
        ]
        lines += [Table(panel or recipe.label, [recipe.axis, *columns], rows).markdown(), ""]
        alt = f"{recipe.label} of {recipe.method}'s paper{panel and f', {panel}'}: test accuracy over {recipe.axis}"
        lines += [f"![{alt}]({picture_name(name, panel or recipe.axis)})", ""]
    return lines


def panels(recipe: Recipe, results: Iterable[Evidence]) -> dict[str, list[str]]:
    """Return the columns of each panel that has finished runs."""
    done = {run.place.column for run in results if run.place and run.is_finished}
    by_panel: dict[str, list[str]] = {}
    for column in recipe.columns:
        by_panel.setdefault(column.panel, []).append(column.name)
    return {panel: columns for panel, columns in by_panel.items() if done & set(columns)}


def values_of(recipe: Recipe, results: Iterable[Evidence]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the accuracy of finished runs: (row, column) -> seed -> accuracy."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for run in results:
        if run.place and run.is_finished and (accuracy := final(recipe, run)) is not None:
            values.setdefault((run.place.row, run.place.column), {})[run.seed] = accuracy
    return values


def _check_places(recipe: Recipe, results: Iterable[Evidence]) -> None:
    rows, columns = ({part.name for part in parts} for parts in (recipe.rows, recipe.columns))
    for place in (evidence.place for evidence in results if evidence.place):
        for kind, name, known in (("row", place.row, rows), ("column", place.column, columns)):
            if name not in known:
                raise ConfigError(
                    f"results for {place.folder} name the {kind} {name!r}, which the table no longer has. "
                    "Delete these files and add the runs again"
                )


def by_column(recipe: Recipe, results: Iterable[Evidence]) -> dict[str, list[Evidence]]:
    """Return evidence by column, in the table's order; columns without any are left out."""
    places: dict[str, list[Evidence]] = {column.name: [] for column in recipe.columns}
    for evidence in results:
        if evidence.place:
            places[evidence.place.column].append(evidence)
    return {column: runs for column, runs in places.items() if runs}


def column_table(recipe: Recipe, column: str, results: Sequence[Evidence]) -> str:
    """Return a column's table of the rows with runs: figure in the paper, ours, the difference, seeds and rounds.

    If the paper's table has a row FedAvg, the differences to FedAvg are also shown: the paper's, and ours, which is
    paired by seed and has an interval from three seeds on.
    """
    place = [c.name for c in recipe.columns].index(column)
    several = len(recipe.protocols) > 1
    baseline = next((row for row in recipe.rows if row.name.lower() == BASELINE.lower()), None)
    fedavg = _runs_of(baseline, results) if baseline else []
    rows, gains = [], []
    for row in recipe.rows:
        if not (runs := _runs_of(row, results)):
            continue
        paper = row.paper[place]
        cells = [row.name, paper.text]
        if baseline:
            cells.append(_minus(paper.mean, baseline.paper[place].mean) if row is not baseline else "-")
        for protocols in recipe.protocols.values():
            ours, difference = _figure(runs, protocols, paper)
            cells.append(ours)
            if baseline:
                gains.append(_gain(runs, fedavg, protocols) if row is not baseline else "-")
                cells.append(gains[-1])
            cells.append(difference)
        rows.append([*cells, _late(runs, recipe), ", ".join(str(run.seed) for run in runs), _rounds(runs)])
    beside = [f"minus {baseline.name}"] if baseline else []
    headings = ["method", "paper %", *beside]
    if any("[" in gain for gain in gains):
        beside = [f"{heading} [95 % interval]" for heading in beside]
    for heading in recipe.protocols:
        headings += [f"{heading} %" if several else "ours %", *beside, "minus paper"]
    headings += [f"last {LATE} evaluations %", "seeds", "rounds"]
    # A figure whose numbers the paper does not print has no columns for them.
    kept = [place for place, cells in enumerate(zip(*rows, strict=True)) if recipe.prints_numbers or {*cells} != {"-"}]
    return Table(
        column, [headings[place] for place in kept], [[row[place] for place in kept] for row in rows]
    ).markdown()


def _runs_of(row: Row, results: Iterable[Evidence]) -> list[Evidence]:
    """Return a row's runs by seed."""
    runs = [evidence for evidence in results if evidence.place and evidence.place.row == row.name]
    return sorted(runs, key=lambda run: run.seed)


def _late(runs: Sequence[Evidence], recipe: Recipe) -> str:
    """Return the mean of the last evaluations over finished runs. One evaluation alone varies from round to round."""
    for protocol in (name for names in recipe.protocols.values() for name in names):
        curves = [run.curves[protocol].accuracy for run in runs if run.is_finished and run.curves.get(protocol)]
        if curves:
            return spread(Figure.of([fmean(accuracy[-LATE:]) for accuracy in curves]), 100)
    return "-"


def _minus(value: float | None, other: float | None) -> str:
    return "-" if value is None or other is None else _signed(value - other)


def _signed(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}"  # never -0.00


def _gain(runs: Sequence[Evidence], baseline: Sequence[Evidence], protocols: Sequence[str]) -> str:
    """Return the mean difference, in points, over the seeds that both rows have finished on the same partition.

    Both are measured under the protocol of the row's figure: no client's own model is compared with a global one.
    """
    finished = [run for run in runs if run.is_finished]
    splits = {(run.seed, run.partition) for run in finished}
    others = [run for run in baseline if run.is_finished and (run.seed, run.partition) in splits]
    for protocol in protocols:
        values, baseline_values = (
            {run.seed: value for run in evidence if (value := run.accuracy(protocol)) is not None}
            for evidence in (finished, others)
        )
        if values:
            difference = paired_difference(values, baseline_values)
            return _with_interval(difference, len(values)) if difference else "-"
    return "-"


def _with_interval(difference: Difference, seeds: int) -> str:
    """Return a difference with its interval, or with the number of seeds if they are too few for an interval.

    A row with a single seed has the difference alone.
    """
    text = _signed(100 * difference.mean)
    if seeds == 1:
        return text
    if difference.n < FEW or difference.low is None or difference.high is None:
        return f"{text} ({counted(difference.n, 'seed')}: no interval)"
    return f"{text} [{_signed(100 * difference.low)}, {_signed(100 * difference.high)}]"


def picture_name(folder: str, column: str) -> str:
    """Return the path of a column's picture, relative to the page."""
    return f"results/{folder}-{slug(column)}.svg"


def _figure(runs: Sequence[Evidence], protocols: Sequence[str], paper: Printed) -> list[str]:
    """Return our figure and its difference to the paper's. Runs in progress have their latest figure alone."""
    finished = [run for run in runs if run.is_finished]
    shown = finished or runs
    for protocol in protocols:
        values = [value for run in shown if (value := run.accuracy(protocol)) is not None]
        figure = Figure.of(values)
        if figure is None or len(values) < len(shown):
            continue
        if finished:
            return [spread(figure, 100), _minus(100 * figure.mean, paper.mean)]
        texts = [
            f"{100 * value:.2f} after round {run.curves[protocol].round[-1]} of {run.planned}"
            for run, value in zip(shown, values, strict=True)
        ]
        return [", ".join(texts), "-"]
    return ["-", "-"]


def _rounds(runs: Sequence[Evidence]) -> str:
    texts = [
        f"{run.rounds}{' (stopped early)' * run.stopped_early}" if run.is_finished else f"{run.rounds} of {run.planned}"
        for run in runs
    ]
    return ", ".join(dict.fromkeys(texts))


def _changed(results: Sequence[Evidence], among: Cells) -> list[str]:
    """Return the differing options of runs whose configuration is not today's recipe."""
    runs_by_difference: dict[str, list[str]] = {}
    for evidence in results:
        difference = changed_since(evidence, among)
        if difference and evidence.place:
            runs_by_difference.setdefault(difference, []).append(f"{evidence.place.row}, seed {evidence.seed}")
    return [
        f"Run with other options than the recipe has now: {'; '.join(runs)}: {text}."
        for text, runs in runs_by_difference.items()
    ]


def _corrected(columns: Mapping[str, Sequence[Evidence]]) -> list[str]:
    texts = []
    for column, runs in columns.items():
        values: dict[str, list[float]] = {}
        for run in runs:
            if run.place and run.figures and "global_before_correction" in run.figures:
                values.setdefault(run.place.row, []).append(run.figures["global_before_correction"]["accuracy"])
        if values:
            texts_of_rows = (f"{row} {spread(Figure.of(accuracies), 100)}" for row, accuracies in values.items())
            texts.append(f"{column}: {', '.join(texts_of_rows)}")
    if not texts:
        return []
    return [f"Before the correction after the last round, which the curves do not show: {'; '.join(texts)}."]


def _origin(name: str, results: Sequence[Evidence]) -> str:
    """Return which machines and versions trained the runs. The evidence of each run has its own."""
    sessions = [session for evidence in results for session in evidence.sessions]
    if not sessions:
        return "Machines and commits of these runs were not recorded."
    machines = [session.machine for session in sessions]
    trained = sorted({machine.gpu or f"{machine.cores} cores of {machine.cpu}" for machine in machines})
    torch = sorted({session.versions.get("torch", "unknown") for session in sessions})
    first = min(session.started for session in sessions)
    hours = sum(evidence.seconds for evidence in results) / 3600
    return (
        f"Trained on {', '.join(trained)}; torch {', '.join(torch)}; from {first:%Y-%m-%d}, {hours:.1f} hours of "
        f"rounds. Machine and commit of each run: `results/{name}/`."
    )


def pictures(results: Sequence[Evidence], recipes: Sequence[Recipe], page: Path) -> dict[Path, Curves]:
    """Return the pictures that a page shows, by file."""
    named = {match[1] for match in _MARKER.finditer(page.read_text(encoding="utf-8"))}
    drawn: dict[Path, Curves] = {}
    for name, recipe in _tables(recipes).items():
        runs = [run for run in results if run.folder == name] if name in named else []
        if recipe.axis:
            charts = {panel or recipe.axis: across(recipe, panel, runs) for panel in panels(recipe, runs)}
        else:
            charts = {column: chart(recipe, column, own) for column, own in by_column(recipe, runs).items()}
        drawn |= {page.parent / picture_name(name, part): curves for part, curves in charts.items()}
    return drawn
