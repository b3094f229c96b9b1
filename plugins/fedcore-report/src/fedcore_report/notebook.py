"""The learning curve in a notebook, of a result and of a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedcore_report import axes, svg
from fedcore_report.charts import Curves, Line

PALETTE = {**axes.LIGHT, "ink": "currentColor", "quiet": "currentColor", "paper": "none", "line": "#8885"}
"""The colours of the notebook, whose background is unknown: texts have that of its own text."""


def learning_curve(curves: Mapping[str, Sequence[tuple[int, float]]], rounds: int) -> str:
    """Return accuracy over rounds as an SVG element; an empty text if nothing was evaluated.

    :param curves: protocol -> pairs of a round (from 1) and an accuracy (0 to 1).
    :param rounds: the number of rounds of the whole run, at which the axis ends.
    """
    lines = [
        Line(name, number, [float(place) for place, _ in points], [100 * accuracy for _, accuracy in points], [], 1)
        for number, (name, points) in enumerate(curves.items())
        if points
    ]
    if not lines:
        return ""
    chart = Curves(
        name="curve",
        title="Accuracy over rounds",
        x_title="round",
        y_title="accuracy %",
        lines=lines,
        ends=(1.0, float(rounds)),
        least=4.0,
    )
    return svg.draw(chart, f"<style>\n{axes.style(PALETTE)}\n</style>")
