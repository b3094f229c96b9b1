"""Pictures of evidence: accuracy over rounds of a table's column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcore.tools import files
from fedcore_report import Curves, Line, mean_line, standalone
from fedcore_reproduce.evidence import Evidence
from fedcore_reproduce.recipe import Recipe


def chart(recipe: Recipe, column: str, results: Sequence[Evidence]) -> Curves:
    """Return the curves of a column's rows, in the table's order: the mean if a row has several seeds.

    A run with more rounds than the others continues as a line of its own. Curves that others published for the column
    follow.
    """
    lines = []
    for number, row in enumerate(recipe.rows):
        runs = [evidence for evidence in results if evidence.place and evidence.place.row == row.name]
        points = [values for run in runs if (values := _points(recipe, run))]
        if not points:
            continue
        open_ends = [run for run in runs if not run.is_finished]
        label = row.name + (f" (round {open_ends[0].rounds} of {open_ends[0].planned})" if open_ends else "")
        lines.append(mean_line(label, number, points))
    for number, curve in enumerate(recipe.curves, len(recipe.rows)):
        if curve.column == column:
            lines.append(Line(curve.name, number, [float(x) for x in curve.round], curve.accuracy, [], 1))
    return Curves(name=column, title=column, x_title="round", y_title="accuracy on the test set, %", lines=lines)


def across(recipe: Recipe, panel: str, results: Sequence[Evidence]) -> Curves:
    """Return the final accuracy of a figure's rows over its x axis: a line per row, the mean if it has several seeds.

    :param panel: the part of the figure; its columns alone are drawn.
    """
    columns = {column.name: (place, column.x) for place, column in enumerate(recipe.columns) if column.panel == panel}
    lines = []
    for number, row in enumerate(recipe.rows):
        seeds: dict[int, dict[int, tuple[float, float]]] = {}
        for run in results:
            if not run.place or run.place.row != row.name or run.place.column not in columns or not run.is_finished:
                continue
            place, x = columns[run.place.column]
            accuracy = final(recipe, run)
            if x is not None and accuracy is not None:
                seeds.setdefault(run.seed, {})[place] = (x, 100 * accuracy)
        if seeds:
            lines.append(mean_line(row.name, number, list(seeds.values())))
    xs = [x for _, x in columns.values() if x is not None]
    return Curves(
        name=panel or recipe.label,
        title=panel or recipe.label,
        x_title=recipe.axis,
        y_title="accuracy on the test set, %",
        lines=lines,
        rounds=all(x == round(x) for x in xs),
    )


def final(recipe: Recipe, run: Evidence) -> float | None:
    """Return a run's accuracy under the first protocol of the recipe that it has a figure for."""
    protocols = (name for names in recipe.protocols.values() for name in names)
    return next((value for name in protocols if (value := run.accuracy(name)) is not None), None)


def draw(drawn: Curves, file: Path) -> None:
    """Draw curves into an SVG file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(file, standalone(drawn))


def is_current(drawn: Curves, file: Path) -> bool:
    """Return whether a file shows these curves."""
    return file.is_file() and file.read_text(encoding="utf-8") == standalone(drawn)


def _points(recipe: Recipe, run: Evidence) -> dict[int, tuple[float, float]]:
    """Return (round, accuracy in %) by round, under the first protocol of the table that the run has a curve for."""
    for protocol in (name for names in recipe.protocols.values() for name in names):
        curve = run.curves.get(protocol)
        if curve:
            return {x: (float(x), 100 * y) for x, y in zip(curve.round, curve.accuracy, strict=True)}
    return {}
