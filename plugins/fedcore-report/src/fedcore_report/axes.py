"""The elements of the page's figures as SVG: scales, axes, rows, marks, texts and legends.

Colours are classes, which chart.css defines by the variables of a page or the colours of a palette. The title of a mark
is its value, which page.js shows. All texts are escaped here.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from fedcore_report.charts import COLORS, Chart, legible, plain

WIDTH = 400
"""The width of a figure, in pixels of a text of height 12. It fits a telephone, and a third of a desktop's screen."""

CHARACTER = 7.0
"""The mean width of a character, in a wide font such as DejaVu Sans."""

LIGHT = {
    "ink": "#1d2530",
    "quiet": "#5b6673",
    "paper": "#fff",
    "line": "#dde2e8",
    "heat": "#1c5fa8",
    "on": "#fff",
}
DARK = {
    "ink": "#dce3ea",
    "quiet": "#98a4b1",
    "paper": "#12161c",
    "line": "#333c47",
    "heat": "#6cace8",
    "on": "#0c1218",
}
"""Palettes: text, quieter text, the background, lines of axes, cells of a grid, text on dark cells."""

ROW = 40
"""The height of a row: a label, and marks below it."""


class Scale(NamedTuple):
    """A mapping from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False
    """Whether the ticks are whole numbers."""

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return about five round numbers; powers of ten on a logarithmic scale."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1, 1 + (last - first) // 6)]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 5))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5.001)
        step = max(step, 1.0) if self.whole else step
        return [step * n for n in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def scale_of(
    values: Iterable[float], start: float, end: float, *, pad: float = 0.05, log: bool = False, least: float = 0.0
) -> Scale:
    """Return a scale for all values. Equal values are in its middle.

    :param pad: the part of the values' range that is left free at each end.
    :param least: the smallest range, so that small differences look small.
    """
    known = list(values)
    low, high = min(known), max(known)
    if log:
        return Scale(low / 1.3, high * 1.3, start, end, log=True)
    if high - low <= 1e-9 * max(1.0, abs(high)):
        low, high = low - max(1.0, abs(low) / 20), high + max(1.0, abs(high) / 20)
    short = max(0.0, least - (high - low)) / 2
    low, high = low - short, high + short
    reach = pad * (high - low)
    return Scale(low - reach, high + reach, start, end)


def apart(wanted: Sequence[float], low: float, high: float, distance: float = 14) -> list[float]:
    """Return places near the wanted places and in their order, at least a distance apart and between two ends."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    places = [0.0] * len(wanted)
    least = low
    for number, place in enumerate(order):
        most = high - distance * (len(order) - 1 - number)
        places[place] = max(least, min(wanted[place], most))
        least = places[place] + distance
    return places


def svg(chart: Chart, height: float, drawn: Iterable[str]) -> str:
    """Return a figure."""
    head = (
        '<svg class="fedcore-chart" xmlns="http://www.w3.org/2000/svg" width="480" role="img" '
        f'viewBox="-6 -6 {WIDTH + 12} {n(height + 12)}" aria-label="{html.escape(plain(chart.title))}">'
    )
    return f"{head}{''.join(drawn)}</svg>"


def style(palette: Mapping[str, str] | None = None) -> str:
    """Return the style of figures.

    :param palette: the colours by name; by default they are the page's variables.
    """
    rules = (files("fedcore_report") / "templates" / "chart.css").read_text(encoding="utf-8")
    rules += "".join(f".c{number} {{ color: {value}; }}\n" for number, value in enumerate(COLORS))
    if palette is not None:
        rules = re.sub(r"var\(--(\w+)\)", lambda name: palette[name[1]], rules)
    return re.sub(r"(^|, )(?=[.\w][^;]*\{)", r"\1.fedcore-chart ", rules.strip(), flags=re.MULTILINE)


def legend(entries: Iterable[tuple[int, str, str]], top: float) -> tuple[float, list[str]]:
    """Return the end of a legend below a figure, and its entries in lines.

    :param entries: for each colour its number, the class of its dash (empty for an area), and its name.
    :param top: the end of the figure.
    """
    drawn, left = [], 4.0
    for number, dash, label in entries:
        name = legible(label, int((WIDTH - 40) / CHARACTER))
        room = (32 if dash else 15) + CHARACTER * len(name)
        if left == 4 or left + room > WIDTH:
            left, top = 4.0, top + 18
        kind = color(number)
        if dash:
            swatch = mark("path", f"{kind} line {dash}", d=f"M{n(left)} {n(top - 8)}h26")
        else:
            swatch = mark("rect", f"{kind} bar", x=left, y=top - 13, width=10, height=10)
        words = text(left + (32 if dash else 15), top - 4, name, "entry", whole=label)
        drawn.append(mark("g", "legend", inside=swatch + words))
        left += room + 14
    return top, drawn


def y_axis(y: Scale, left: float, right: float, name: str) -> str:
    """Return the axis at the left, with horizontal grid lines."""
    drawn = []
    for tick in y.ticks():
        drawn.append(mark("path", "grid", d=f"M{n(left)} {n(y(tick))}H{n(right)}"))
        drawn.append(text(left - 5, y(tick) + 4, f"{tick:g}", "tick end"))
    return "".join(drawn) + upright(11, (y.start + y.end) / 2, name)


def x_axis(x: Scale, bottom: float, name: str, *, grid: bool = False) -> str:
    """Return the axis below a figure, with or without vertical grid lines."""
    drawn = []
    for tick in x.ticks():
        if grid:
            drawn.append(mark("path", "grid", d=f"M{n(x(tick))} 0V{n(bottom)}"))
        drawn.append(text(x(tick), bottom + 15, f"{tick:g}", "tick middle"))
    return "".join(drawn) + text((x.start + x.end) / 2, bottom + 32, name, "axis middle")


def rows(labels: Sequence[str], values: Sequence[str]) -> tuple[list[str], list[float], float]:
    """Return rows' labels with their values, the middle of each row's marks, and the end of the last row."""
    places = [ROW * number + 26.0 for number in range(len(labels))]
    drawn = []
    for label, value, at in zip(labels, values, places, strict=True):
        room = int((WIDTH - 8) / CHARACTER) - len(value) - 2
        drawn.append(text(4, at - 13, legible(label, room), whole=label))
        drawn.append(text(WIDTH - 4, at - 13, value, "value end"))
    return drawn, places, ROW * len(labels) + 4.0


def mark(tag: str, kind: str, *titles: str, inside: str = "", **attributes: float | str) -> str:
    """Return an element of a class.

    :param titles: the lines of its title.
    """
    written = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, str) else n(value)}"'
        for name, value in attributes.items()
    )
    title = f"<title>{html.escape(chr(10).join(map(plain, titles)))}</title>" if titles else ""
    content = title + inside
    return f'<{tag} class="{kind}"{written}>{content}</{tag}>' if content else f'<{tag} class="{kind}"{written}/>'


def text(x: float, y: float, words: str, kind: str = "", *, whole: str = "", turned: int = 0) -> str:
    """Return a text.

    :param whole: the text before it was cut, for a title.
    :param turned: the degrees by which it is turned around its place.
    """
    if not words:
        return ""
    full_text = [whole] if whole and plain(whole) != words else []
    place = {"x": n(x), "y": n(y)} | ({"transform": f"rotate({turned} {n(x)} {n(y)})"} if turned else {})
    return mark("text", kind, *full_text, inside=html.escape(plain(words)), **place)


def upright(x: float, y: float, name: str) -> str:
    """Return the name of a vertical axis."""
    return text(x, y, name, "axis middle", turned=-90)


def path(x: Scale, y: Scale, xs: Iterable[float], ys: Iterable[float]) -> str:
    """Return the drawing of a line through points."""
    return "M" + "L".join(f"{n(x(a))} {n(y(b))}" for a, b in zip(xs, ys, strict=True))


def color(number: int) -> str:
    """Return the class of a colour's number."""
    return f"c{number % len(COLORS)}"


def n(value: float) -> str:
    """Return a number of pixels to a tenth."""
    return f"{value:.1f}".removesuffix(".0")
