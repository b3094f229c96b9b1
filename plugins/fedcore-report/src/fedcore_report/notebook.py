"""The learning curve in a notebook, of a result and of a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcore.tools import protocols
from fedcore_report import axes, svg
from fedcore_report.charts import Curves, Line
from fedcore_report.lines import named
from fedcore_study.tools import Measure

PALETTE = {**axes.LIGHT, "ink": "currentColor", "quiet": "currentColor", "paper": "none", "line": "#8885"}
"""The colours of the notebook, whose background is unknown: texts have that of its own text."""


def learning_curve(records: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Return accuracy over rounds as an SVG element; an empty text if nothing was evaluated.

    Without classes, it is the task's first figure. Rounds in which it is not defined are left out.

    :param records: the rounds' records.
    :param rounds: the number of rounds of the whole run, at which the axis ends.
    """
    lines: dict[str, Line] = {}
    figure = Measure("accuracy")
    for record in records:
        for name in protocols.EVALUATED:
            row = (record["metrics"] or {}).get(name) or {}
            figure = Measure(protocols.figure_of(row)) if row else figure
            if row and (value := row[figure.name]) is not None:
                line = lines.setdefault(name, Line(name, len(lines), [], [], [], 1))
                line.x.append(float(record["round"] + 1))
                line.y.append(figure.scale * value)
    if not lines:
        return ""
    chart = Curves(
        name="curve",
        title=f"{named(figure)} over rounds",
        x_title="round",
        y_title=f"{figure.name}{figure.unit}",
        lines=[*lines.values()],
        ends=(1.0, float(rounds)),
        least=4.0 if figure.unit else 0.0,
    )
    return svg.draw(chart, f"<style>\n{axes.style(PALETTE)}\n</style>")
