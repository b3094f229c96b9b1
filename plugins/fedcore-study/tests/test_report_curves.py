"""Curves that lie on one another are both seen, in the page and in figures for papers."""

from __future__ import annotations

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from fedcore_study.reports import figures, static
from fedcore_study.reports.charts import Curves, Line
from fedcore_study.reports.palette import color


def curves(*values: list[float]) -> Curves:
    lines = [Line(f"m{n}", n, [float(x) for x in range(1, len(y) + 1)], y, [], 1) for n, y in enumerate(values)]
    return Curves(name="c", title="c", x_title="round", y_title="accuracy %", lines=lines)


@pytest.mark.parametrize(
    ("values", "covers"),
    [
        ([[10.0, 50.0, 90.0], [10.0, 50.0, 90.0]], [0, 1]),
        ([[10.0, 50.0, 90.0], [10.5, 50.5, 90.5]], [0, 1]),  # nearer than one can see
        ([[10.0, 50.0, 90.0], [20.0, 60.0, 80.0]], [0, 0]),
        ([[10.0, 50.0, 90.0], [20.0, 60.0, 90.0]], [0, 0]),  # they meet at the end
        ([[10.0, 50.0], [90.0, 10.0], [10.0, 50.0], [10.0, 50.0]], [0, 0, 1, 2]),
        ([[5.0, 5.0], [5.0, 5.0]], [0, 1]),
        ([[], [5.0]], [0, 0]),
    ],
)
def test_what_lies_on_others_is_found(values, covers):
    assert curves(*values).covers == covers


def test_the_upper_curve_has_gaps_and_rings():
    chart = curves([10.0, 50.0, 90.0], [10.0, 50.0, 90.0], [20.0, 20.0, 20.0])
    below, above, apart = figures.figure(chart).data
    assert (below.line.dash, above.line.dash, apart.line.dash) == ("solid", "dash", "solid")
    assert (below.marker.symbol, above.marker.symbol) == (None, "circle-open")
    with mpl.rc_context():
        axes = Figure().add_subplot()
        static.draw(chart, axes)
    below, above, apart = axes.lines
    assert (below.get_linestyle(), above.get_linestyle(), apart.get_linestyle()) == ("-", "--", "-")
    assert (below.get_marker(), above.get_marker()) == ("None", "o")
    assert above.get_markerfacecolor() == "none"
    assert above.get_color() == color(1)
