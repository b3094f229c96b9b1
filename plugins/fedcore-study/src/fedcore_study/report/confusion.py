"""Which classes a model takes for which, from the summaries of finished runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedcore_study.compare.groups import Group
from fedcore_study.report.charts import Chart, Grid, Heatmap, Omitted, plain

Counts = list[list[int]]


def confusion(group: Group, class_names: Sequence[str] | None) -> Chart | Omitted:
    """Return the confusion matrices of a group's finished runs: a layer per row, the counts of its seeds added."""
    title = "Confusion matrix"
    layers: dict[str, Grid] = {}
    for label, runs in group.rows.items():
        found = [matrix for run in runs if (matrix := counts_in(run.summary)) is not None]
        if found and len({len(matrix) for matrix in found}) == 1:
            layers[plain(label)] = in_percent(found)
    sizes = {len(grid) for grid in layers.values()}
    if len(sizes) != 1:
        reason = "a finished run records it for its global model, up to 100 classes; runs of earlier versions did not"
        return Omitted(title, reason)
    (size,) = sizes
    names = list(class_names or [])
    names = names if len(names) == size else [str(number) for number in range(size)]
    return Heatmap(
        name="confusion",
        title=title,
        about="Of the test samples of a class (row), the percentage that the final global model takes for each class "
        "(column), all seeds together; shades grow with the square root.",
        x_title="predicted",
        y_title="class",
        columns=names,
        rows=names,
        layers=layers if len(layers) > 1 else {"": next(iter(layers.values()))},
        unit="%",
        root=True,
    )


def counts_in(summary: Any) -> Counts | None:
    """Return the matrix of a summary, which may be damaged; None where there is no square one of counts."""
    matrix = summary.get("confusion") if isinstance(summary, dict) else None
    if not isinstance(matrix, list) or not matrix:
        return None
    for row in matrix:
        if not isinstance(row, list) or len(row) != len(matrix):
            return None
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in row):
            return None
    return matrix


def in_percent(found: Sequence[Counts]) -> Grid:
    """Return the sum of matrices, each row in percent of its samples; None in a row without any."""
    total = [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]
    return [[100 * count / sum(row) if sum(row) else None for count in row] for row in total]
