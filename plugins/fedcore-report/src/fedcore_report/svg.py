"""Charts as SVG: lines, rows with boxes, intervals or bars, a grid of numbers, a cloud of points."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

from fedcore_report import axes
from fedcore_report.axes import CHARACTER, WIDTH, Scale, color, mark, n, path, scale_of, text
from fedcore_report.charts import (
    Bars,
    Boxes,
    Chart,
    Curves,
    Heatmap,
    Intervals,
    Line,
    Scatter,
    legible,
    plain,
    turn,
)

HEIGHT = 260

LABELS = (12, 20)
"""The largest number of lines with names at their ends, and of characters of such a name. Else there is a legend."""

PLACES = 60
"""The largest number of places of a line at which its values are shown."""

CELLS = 1500
"""The largest number of cells that show their values. In a larger grid, all cells of one shade are one path."""

DOTS = 1000
"""The largest number of values that are drawn as dots over boxes."""


Entries: TypeAlias = "list[tuple[int, str, str]]"


def draw(chart: Chart, *before: str) -> str:
    """Return a chart as an SVG element, with a legend if it needs one. All texts in it are escaped.

    :param before: elements below the chart's own.
    """
    height, drawn, entries = _drawn(chart)
    end, legend = axes.legend(entries, height)
    return axes.svg(chart, end, [*before, *drawn, *legend])


def standalone(chart: Chart) -> str:
    """Return a chart as an SVG file for light and dark screens. Its bits depend on the chart alone."""
    dark = f"@media (prefers-color-scheme: dark) {{\n{axes.style(axes.DARK)}\n}}"
    style = f"<style>\n{axes.style(axes.LIGHT)}\n{dark}\n</style>"
    return draw(chart, style, '<rect class="paper" x="-6" y="-6" width="100%" height="100%"/>') + "\n"


@functools.singledispatch
def _drawn(chart: Chart) -> tuple[float, list[str], Entries]:
    """Return a chart's height, its elements, and the entries of its legend."""
    raise TypeError(f"no way to draw {type(chart).__name__}")


@_drawn.register
def _(chart: Curves) -> tuple[float, list[str], Entries]:
    names = [plain(line.label) for line in chart.lines]
    longest = max(map(len, names))
    direct = len(names) <= LABELS[0] and longest <= LABELS[1]
    top, bottom, left = 10.0, HEIGHT - 40.0, 48.0
    right = WIDTH - (12 + CHARACTER * longest if direct else 10)
    points = [(x, y) for line in chart.lines for xs, ys in line.parts for x, y in zip(xs, ys, strict=True)]
    edges = [value for line in chart.lines for edge in chart.band(line) for value in edge]
    whole = (0.0, 1.0) if chart.diagonal else ()
    places = [*(x for x, _ in points), *chart.ends, *whole]
    x = scale_of(places, left, right, pad=0)._replace(whole=chart.rounds)
    y = scale_of([*(y for _, y in points), *edges, *whole], bottom, top, log=chart.log, least=chart.least)
    lines = list(zip(chart.lines, (f"d{dash}" for dash in chart.dashes), chart.covers, strict=True))
    drawn = [axes.y_axis(y, left, right, chart.y_title), axes.x_axis(x, bottom, chart.x_title)]
    if chart.diagonal:
        drawn.append(mark("path", "lead d1", d=path(x, y, whole, whole)))
    for line in chart.lines:
        low, up = chart.band(line)
        if len(low) > 1:
            around = f"{path(x, y, line.x, up)}L{path(x, y, line.x[::-1], low[::-1])[1:]}Z"
            drawn.append(mark("path", f"{color(line.color)} band", d=around))
    drawn += [_line(line, dash, covers, x, y) for line, dash, covers in lines]
    drawn += _names(chart, x, y, right) if direct else []
    drawn += _strips(chart, x, top, bottom) if chart.rounds else _hits(chart, x, y)
    legend = [] if direct else [(line.color, dash, line.label) for line, dash, _ in lines]
    return HEIGHT, drawn, legend


def _line(line: Line, dash: str, covers: int, x: Scale, y: Scale) -> str:
    """Return a mean and its tails. A line over others is thinner and has gaps and rings, so that they can be seen."""
    kind = color(line.color)
    drawn = (
        [mark("path", f"{kind} line {dash}{' over' if covers else ''}", d=path(x, y, line.x, line.y))] if line.x else []
    )
    points = list(zip(line.x, line.y, strict=True))
    every = max(1, len(points) // 12)
    rings = points[covers % every :: every] if covers or len(points) == 1 else []
    drawn += [mark("circle", f"{kind} ring", cx=x(a), cy=y(b), r=3) for a, b in rings]
    title = f"{line.label}, one run"
    return "".join([*drawn, *(mark("path", f"{kind} line tail", title, d=path(x, y, *tail)) for tail in line.tails)])


def _names(chart: Curves, x: Scale, y: Scale, right: float) -> Iterator[str]:
    """Yield the lines' names at their ends, moved apart, each with a stroke to the end of its line."""
    last = [max(line.parts, key=lambda part: part[0][-1:]) for line in chart.lines]
    ends = [(x(xs[-1]), y(ys[-1])) for xs, ys in last]
    places = axes.apart([height for _, height in ends], 8, HEIGHT - 44)
    for line, (end, height), place in zip(chart.lines, ends, places, strict=True):
        if abs(place - height) > 2 or right - end > 2:
            stroke = f"M{n(end)} {n(height)}H{n(right)}L{n(right + 6)} {n(place)}"
            yield mark("path", f"{color(line.color)} lead", d=stroke)
        yield text(right + 8, place + 4, line.label, f"{color(line.color)} label")


def _strips(chart: Curves, x: Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield invisible strips for the rounds (some, if there are many) with the values of all lines as title."""
    values = [dict(zip(line.x, zip(line.y, line.std or line.y, strict=True), strict=True)) for line in chart.lines]
    every = sorted(set().union(*values))
    places = every[:: math.ceil(len(every) / PLACES)]
    middles = [(x(a) + x(b)) / 2 for a, b in itertools.pairwise(places)]
    for at, (start, end) in zip(places, itertools.pairwise([x.start, *middles, x.end]), strict=False):
        title = [f"{chart.x_title} {at:g}"]
        for line, by_place in zip(chart.lines, values, strict=True):
            if at in by_place:
                value, std = by_place[at]
                title.append(f"{line.label}: {value:.4g}" + (f" ± {std:.2g}" if line.std else ""))
        box = mark("rect", "hit", x=start, y=top, width=end - start, height=bottom - top)
        yield mark("g", "strip", *title, inside=box + mark("path", "guide", d=f"M{n(x(at))} {n(top)}V{n(bottom)}"))


def _hits(chart: Curves, x: Scale, y: Scale) -> Iterator[str]:
    """Yield invisible circles for the points (some, if there are many) with their values as title."""
    for line in chart.lines:
        for a, b in list(zip(line.x, line.y, strict=True))[:: math.ceil(len(line.x) / PLACES) or 1]:
            title = line.label, f"{b:.4g} at {a:.4g} {chart.x_title}"
            yield mark("circle", "hit", *title, cx=x(a), cy=y(b), r=6)


@_drawn.register
def _(chart: Boxes) -> tuple[float, list[str], Entries]:
    x = scale_of((value for box in chart.boxes for value in (box.five[0], box.five[-1])), 8, WIDTH - 12)
    drawn, places, bottom = axes.rows(
        [b.label for b in chart.boxes], [f"median {b.five[2]:.{chart.digits}f}" for b in chart.boxes]
    )
    few = sum(len(box.values) for box in chart.boxes) <= DOTS
    for box, at in zip(chart.boxes, places, strict=True):
        low, first, median, third, high = (n(x(value)) for value in box.five)
        parts = mark("path", "whisker", d=f"M{low} {n(at)}H{first}M{third} {n(at)}H{high}")
        parts += mark("path", "box", d=f"M{first} {n(at - 7)}H{third}v14H{first}Z")
        parts += mark("path", "median", d=f"M{median} {n(at - 7)}v14")
        lowest, lower, _, upper, highest = (f"{value:.{chart.digits}f}" for value in box.five)
        title = box.label, f"lowest {lowest}, middle half {lower} to {upper}, highest {highest}"
        drawn.append(mark("g", color(box.color), *title, inside=parts))
        for number, (value, name) in enumerate(zip(box.values, box.names, strict=True) if few else ()):
            height = at - 5 + number * 7 % 11  # not over one another, and the same in each report
            title = name, f"{value:.{chart.digits}f}"
            drawn.append(mark("circle", f"{color(box.color)} dot", *title, cx=x(value), cy=height, r=2.5))
    return bottom + 38, [axes.x_axis(x, bottom, chart.x_title, grid=True), *drawn], []


@_drawn.register
def _(chart: Intervals) -> tuple[float, list[str], Entries]:
    ends = [end for row in chart.rows for end in (row.mean, *(row.ends or ()))]
    ends += [0.0] if chart.differences else []
    x = scale_of([*ends, *(value for row in chart.rows for value in row.each.values())], 8, WIDTH - 12)
    form = f"{'+' if chart.differences else ''}.{chart.digits}f"
    values = [
        f"{row.mean:{form}}" + (f" [{row.ends[0]:{form}}, {row.ends[1]:{form}}]" if row.ends else "")
        for row in chart.rows
    ]
    drawn, places, bottom = axes.rows([row.label for row in chart.rows], values)
    for row, value, place in zip(chart.rows, values, places, strict=True):
        at = place - 3
        parts = mark("circle", "mean", cx=x(row.mean), cy=at, r=4.5)
        if row.ends is not None:
            low, high = (n(x(end)) for end in row.ends)
            parts += mark("path", "line", d=f"M{low} {n(at)}H{high}M{low} {n(at - 4)}v8M{high} {n(at - 4)}v8")
        drawn.append(mark("g", f"{color(row.color)} interval", row.label, value, inside=parts))
        for name, single in row.each.items():
            title = f"{row.label}, {name}", f"{single:{form}}"
            drawn.append(mark("circle", f"{color(row.color)} ring", *title, cx=x(single), cy=place + 7, r=3))
    zero = [mark("path", "zero", d=f"M{n(x(0))} 0V{n(bottom)}")] if chart.differences else []
    return bottom + 38, [axes.x_axis(x, bottom, chart.x_title, grid=True), *zero, *drawn], []


@_drawn.register
def _(chart: Bars) -> tuple[float, list[str], Entries]:
    ends = [
        list(itertools.accumulate((part.values[bar] for part in chart.parts), initial=0.0))
        for bar in range(len(chart.bars))
    ]
    x = Scale(0.0, max(places[-1] for places in ends), 8, WIDTH - 12)
    drawn, places, bottom = axes.rows(chart.bars, [f"{total:.3g}" for total in chart.totals])
    for bar, end, at in zip(chart.bars, ends, places, strict=True):
        for number, (part, (start, stop)) in enumerate(zip(chart.parts, itertools.pairwise(end), strict=True)):
            if x(stop) - x(start) >= 0.5:
                title = f"{bar}, {part.label}", f"{stop - start:.3g} {chart.x_title}"
                kind = f"{color(number)} bar"
                drawn.append(mark("rect", kind, *title, x=x(start), y=at - 7, width=x(stop) - x(start), height=14))
    legend = [(number, "", part.label) for number, part in enumerate(chart.parts)] if len(chart.parts) > 1 else []
    axis = axes.x_axis(x, bottom, chart.x_title, grid=True)
    return bottom + 38, [axis, *drawn], legend


@_drawn.register
def _(chart: Heatmap) -> tuple[float, list[str], Entries]:
    rows = [legible(name, 18) for name in chart.rows]
    columns = [legible(name, 12) for name in chart.columns]
    left = 24 + CHARACTER * max(map(len, rows))
    wide = (WIDTH - 4 - left) / len(columns)
    high = min(24.0, max(wide, 3.0 if len(rows) > 40 else 12.0))
    bottom = high * len(rows) + 2
    longest = CHARACTER * max(map(len, columns))
    slanted = chart.roomy and longest > wide
    drawn = list(_cells(chart, left, wide, high))
    for number in range(0, len(rows), math.ceil(12 / high)):
        drawn.append(text(left - 5, high * (number + 0.5) + 4, rows[number], "end", whole=chart.rows[number]))
    for number in range(0, len(columns), 1 if slanted else math.ceil((longest + 4) / wide)):
        place = left + wide * (number + 0.5), bottom + 12
        drawn.append(text(*place, columns[number], "end" if slanted else "middle", turned=-40 if slanted else 0))
    below = bottom + 28 + (0.65 * longest if slanted else 0)
    drawn.append(text((left + WIDTH) / 2, below, chart.x_title, "axis middle"))
    drawn.append(axes.upright(10, bottom / 2, chart.y_title))
    return below + 6, drawn, []


def _cells(chart: Heatmap, left: float, wide: float, high: float) -> Iterator[str]:
    """Yield the cells that have a value, and the value if there is room."""
    least, most = chart.scale
    few = len(chart.rows) * len(chart.columns) <= CELLS
    gap = 1 if wide > 6 else 0
    shades: dict[int, str] = {}
    for row, values in enumerate(chart.grid):
        for column, value in enumerate(values):
            if value is None or (chart.root and not value):
                continue
            shade = round(20 * max(0.0, (chart.shade(value) - least) / (most - least)))
            if not few:
                shades[shade] = shades.get(shade, "") + f"M{column} {row}h1v1h-1Z"
                continue
            where = f"{chart.y_title} {chart.rows[row]}, {chart.x_title} {chart.columns[column]}".strip()
            title = where, f"{value:.1f} %" if chart.unit == "%" else f"{value:g} {chart.unit}".rstrip()
            x, y = left + wide * column, high * row
            box = f"M{n(x)} {n(y)}h{n(wide - gap)}v{n(high - gap)}h-{n(wide - gap)}Z"
            yield mark("path", "cell", *title, fill_opacity=f"{shade / 20:g}", d=box)
            if chart.roomy:
                yield text(
                    x + wide / 2, y + high / 2 + 4, chart.written(value), f"{'on' if shade > 13 else 'in'} middle"
                )
    place = f"translate({n(left)} 0) scale({wide:.3f} {high:.3f})"
    for shade, boxes in shades.items():
        yield mark("path", "cell", fill_opacity=f"{shade / 20:g}", d=boxes, transform=place)


@_drawn.register
def _(chart: Scatter) -> tuple[float, list[str], Entries]:
    height = 320
    x = scale_of((value for group in chart.groups for value in group.x), 8, WIDTH - 8, pad=0)
    y = scale_of((value for group in chart.groups for value in group.y), height - 8, 8, pad=0)
    drawn = []
    for number, group in enumerate(chart.groups):
        points = "".join(f"M{n(x(a))} {n(y(b))}h0" for a, b in zip(group.x, group.y, strict=True))
        kind = f"{color(number)} point{' square' if turn(number) % 2 else ''}"
        drawn.append(mark("path", kind, group.label, d=points))
    few = len(chart.groups) <= LABELS[0]
    legend = [(number, "", group.label) for number, group in enumerate(chart.groups)] if few else []
    return height, drawn, legend
