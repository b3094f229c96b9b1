"""The learning curve in a notebook, of a result and of a run while it trains."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 118, 10, 34
COLORS = ("#3d7fd6", "#d9822b", "#3a9d62", "#b0569f")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""The dashes of the protocols, by which curves with the same values can be told apart."""

Points = Sequence[tuple[int, float]]


def learning_curve(curves: Mapping[str, Points], rounds: int) -> str:
    """Return accuracy over rounds as an SVG element; an empty text if nothing was evaluated.

    Texts and lines have the page's colour of text, for pages with a dark background.

    :param curves: protocol -> pairs of a round (from 1) and an accuracy (0 to 1).
    :param rounds: the number of rounds of the whole run, at which the axis ends.
    """
    values = [100 * accuracy for points in curves.values() for _, accuracy in points]
    if not values:
        return ""
    step = _round_step((max(values) - min(values)) / 5)
    low, high = step * int(min(values) // step), step * int(-(-max(values) // step))
    if high < low + 4 * step:  # small differences are to look small
        high = min(low + 4 * step, 100)
        low = high - 4 * step

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((number - 1) / (rounds - 1) if rounds > 1 else 0.5)

    def y(percent: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - percent) / (high - low)

    parts = []
    for percent in range(low, high + 1, step):
        parts.append(_line(LEFT, y(percent), WIDTH - RIGHT, y(percent), 'stroke="currentColor" stroke-opacity="0.2"'))
        parts.append(_text(LEFT - 6, y(percent) + 4, str(percent), "end"))
    apart = _round_step(rounds / 8)
    for number in sorted({1, *range(apart, rounds + 1, apart)}):
        parts.append(_text(x(number), HEIGHT - BOTTOM + 16, str(number), "middle"))
    parts.append(_text(x((1 + rounds) / 2), HEIGHT - 4, "round", "middle"))
    parts.append(
        f'<text x="12" y="{y((low + high) / 2):.1f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {y((low + high) / 2):.1f})">accuracy %</text>'
    )
    for number, (name, points) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        style = f'stroke="{color}" stroke-dasharray="{DASHES[number % len(DASHES)]}"'
        path = " ".join(f"{x(position):.1f},{y(100 * accuracy):.1f}" for position, accuracy in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {style}/>')
        if len(points) == 1:
            parts.append(f'<circle cx="{x(points[0][0]):.1f}" cy="{y(100 * points[0][1]):.1f}" r="3" fill="{color}"/>')
        top = TOP + 10 + 16 * number
        parts.append(_line(WIDTH - RIGHT + 10, top, WIDTH - RIGHT + 30, top, f'stroke-width="2" {style}'))
        parts.append(_text(WIDTH - RIGHT + 36, top + 4, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'style="max-width:100%;font:11px sans-serif" fill="currentColor" stroke-linecap="round">'
        f"<title>Accuracy over rounds</title>{''.join(parts)}</svg>"
    )


def _round_step(least: float) -> int:
    """Return the least of 1, 2, 5, 10, 20, 50, ... that is not below a number."""
    step = 1
    while step < least:
        step = step * 5 // 2 if str(step).startswith("2") else step * 2
    return step


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
