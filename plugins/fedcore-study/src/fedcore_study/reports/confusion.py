"""Which classes a model takes for which, from the summaries of finished runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedcore.base.protocols import PROTOCOLS, confusion_key
from fedcore_study.comparisons.groups import Group
from fedcore_study.reports.charts import Chart, Grid, Heatmap, Omitted, plain

Counts = list[list[int]]


def confusions(group: Group, class_names: Sequence[str] | None) -> Iterator[Chart | Omitted]:
    """Yield the confusion matrices of a group's finished runs, by protocol."""
    drawn = [chart for protocol in PROTOCOLS if (chart := confusion(group, protocol, class_names)) is not None]
    yield from drawn
    if not drawn:
        reason = "a finished run records it, up to 100 classes"
        yield Omitted("Confusion matrix", reason)


def confusion(group: Group, protocol: str, class_names: Sequence[str] | None) -> Chart | None:
    """Return a protocol's matrices: a layer per row, the counts of its seeds added; None where there are none."""
    layers: dict[str, Grid] = {}
    for label, runs in group.rows.items():
        found = [matrix for run in runs if (matrix := counts_in(run.summary, confusion_key(protocol))) is not None]
        if found and len({len(matrix) for matrix in found}) == 1:
            layers[plain(label)] = in_percent(found)
    sizes = {len(grid) for grid in layers.values()}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    clients = "clients and " if PROTOCOLS[protocol].on_clients else ""
    names = list(class_names or [])
    names = names if len(names) == size else [str(number) for number in range(size)]
    return Heatmap(
        name=f"confusion-{protocol}",
        title=f"Confusion matrix, {protocol}",
        about=f"Of the samples of a class (row), the percentage taken for each class (column) by "
        f"{PROTOCOLS[protocol].measures}, at the end; all {clients}seeds together. Shades grow with the square root.",
        x_title="predicted",
        y_title="class",
        columns=names,
        rows=names,
        layers=layers if len(layers) > 1 else {"": next(iter(layers.values()))},
        unit="%",
        root=True,
    )


def counts_in(summary: Any, key: str) -> Counts | None:
    """Return a matrix of a summary, which may be damaged; None where there is no square one of counts."""
    matrix = summary.get(key) if isinstance(summary, dict) else None
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
