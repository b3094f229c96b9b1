"""The learning curve of a notebook."""

from __future__ import annotations

import re

import pytest

from fedcore_report import notebook


def learning_curve(curves, rounds, figure="accuracy"):
    """Draw rows with one figure, by protocol."""
    records = [
        {"round": place - 1, "metrics": {protocol: {figure: value, "loss": 1.0}}}
        for protocol, points in curves.items()
        for place, value in points
    ]
    return notebook.learning_curve([*records, {"round": 8, "metrics": None}], rounds)


def test_a_curve_is_drawn_where_the_figures_are():
    """Rounds 1 and 5 of 9 at 20 % and 60 %: from the left end of the axis to its middle, upwards."""
    svg = learning_curve({"global": [(1, 0.2), (5, 0.6)]}, 9)
    (points,) = re.findall(r'class="c0 line d0" d="M([^"]+)"', svg)
    (left, low), (middle, high) = ([float(number) for number in point.split()] for point in points.split("L"))
    (eight,) = (float(x) for x in re.findall(r'class="tick middle" x="([\d.]+)"[^>]*>8<', svg))
    assert left == 48
    assert (eight - left) / (middle - left) == pytest.approx(7 / 4, abs=0.01)
    assert low > high
    assert learning_curve({}, 5) == ""
    assert learning_curve({"global": []}, 5) == ""
    assert "<circle" in learning_curve({"global": [(1, 0.2)]}, 1)
    assert "&lt;b&gt;" in learning_curve({"global": [(1, 0.2)]}, 1, "<b>")


def test_a_task_without_accuracy_has_its_first_figure_in_its_units():
    svg = learning_curve({"global": [(1, 45.4), (2, None), (3, 44.9)]}, 3, "rmse")
    assert "Rmse over rounds" in svg
    assert ">rmse<" in svg
    assert svg.count("<circle") == 0 or "4540" not in svg
    assert [int(text) for text in re.findall(r'class="tick end"[^>]*>(\d+)<', svg)] == [45]


def test_the_notebooks_own_colours_are_used():
    svg = learning_curve({"global": [(1, 0.2), (5, 0.6)]}, 9)
    assert "text { fill: currentColor;" in svg
    assert "var(" not in svg


@pytest.mark.parametrize(
    ("rounds", "expected"), [(2, [1, 2]), (5, [1, 2, 3, 4, 5]), (13, [5, 10]), (100, [20, 40, 60, 80, 100])]
)
def test_a_curve_names_whole_rounds(rounds, expected):
    assert _ticks({"global": [(1, 0.31), (rounds, 0.62)]}, rounds)[1] == expected


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.02, 0.98), [0, 50, 100]),
        ((0.855, 0.905), [86, 88, 90]),
        ((0.981, 0.983), [96, 97, 98, 99, 100]),  # small differences look small
        ((0.0, 0.0), [-2, -1, 0, 1, 2]),
    ],
)
def test_a_curve_names_whole_percents(accuracies, expected):
    assert _ticks({"global": list(enumerate(accuracies, 1))}, 2)[0] == expected


def _ticks(curves, rounds):
    """Return the numbers along both axes of a curve: percents and rounds."""
    texts = re.findall(r'class="tick (end|middle)"[^>]*>([-\d]+)<', learning_curve(curves, rounds))
    return tuple([int(number) for anchor, number in texts if anchor == axis] for axis in ("end", "middle"))
