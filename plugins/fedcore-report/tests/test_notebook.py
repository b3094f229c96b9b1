"""The learning curve of a notebook."""

from __future__ import annotations

import re

import pytest

from fedcore_report.notebook import learning_curve


def test_a_curve_is_drawn_where_the_figures_are():
    """Rounds 0 and 4 of 5 at 20 % and 60 %: the first and last place, the lowest and highest line."""
    svg = learning_curve({"global": [(1, 0.2), (5, 0.6)]}, 5)
    (points,) = re.findall(r'polyline points="([^"]+)"', svg)
    first, last = ([float(number) for number in point.split(",")] for point in points.split())
    assert (first, last) == ([44.0, 186.0], [402.0, 10.0])
    assert learning_curve({}, 5) == ""
    assert "<circle" in learning_curve({"global": [(1, 0.2)]}, 1)
    assert "&lt;b&gt;" in learning_curve({"<b>": [(1, 0.2)]}, 1)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(1, [1]), (2, [1, 2]), (7, [1, 2, 3, 4, 5, 6, 7]), (13, [1, 2, 4, 6, 8, 10, 12]), (100, [1, 20, 40, 60, 80, 100])],
)
def test_a_curve_names_whole_rounds(rounds, expected):
    assert _ticks({"global": [(1, 0.31), (rounds, 0.62)]}, rounds)[1] == expected


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.02, 0.98), [0, 20, 40, 60, 80, 100]),
        ((0.855, 0.905), [85, 86, 87, 88, 89, 90, 91]),
        ((0.981, 0.983), [96, 97, 98, 99, 100]),
        ((1.0, 1.0), [96, 97, 98, 99, 100]),
        ((0.0, 0.0), [0, 1, 2, 3, 4]),
    ],
)
def test_a_curve_names_whole_percents(accuracies, expected):
    assert _ticks({"global": list(enumerate(accuracies, 1))}, 2)[0] == expected


def _ticks(curves, rounds):
    """Return the numbers along both axes of a curve: percents and rounds."""
    texts = re.findall(r'text-anchor="(end|middle)">(\d+)<', learning_curve(curves, rounds))
    return tuple([int(number) for anchor, number in texts if anchor == axis] for axis in ("end", "middle"))
