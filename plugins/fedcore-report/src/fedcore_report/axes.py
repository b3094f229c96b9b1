"""The elements of the page's figures as SVG: scales, axes, rows, marks, texts and legends.

Colours are classes, which page.css defines for light and dark pages. The title of a mark is its value, which page.js
shows. All texts are escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedcore_report.charts import COLORS, Chart, legible, plain

WIDTH = 400
"""The width of a figure, in pixels of a text of height 12. It fits a telephone, and a third of a desktop's screen."""

CHARACTER = 7.0
"""The mean width of a character, in a wide font such as DejaVu Sans."""

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


def scale_of(values: Iterable[float], start: float, end: float, *, pad: float = 0.05, log: bool = False) -> Scale:
    """Return a scale for all values. Equal values are in its middle.

    :param pad: the part of the values' range that is left free at each end.
    """
    known = list(values)
    low, high = min(known), max(known)
    if log:
        return Scale(low / 1.3, high * 1.3, start, end, log=True)
    if high - low <= 1e-9 * max(1.0, abs(high)):
        low, high = low - max(1.0, abs(low) / 20), high + max(1.0, abs(high) / 20)
    reach = pad * (high - low)
    return Scale(low - reach, high + reach, start, end)


def apart(wanted: Sequence[float], low: float, high: float, distance: float = 14) -> list[float]:
    """Return places near the wanted places and in their order, at least a distance apart and between two ends."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    found = [0.0] * len(wanted)
    least = low
    for number, place in enumerate(order):
        most = high - distance * (len(order) - 1 - number)
        found[place] = max(least, min(wanted[place], most))
        least = found[place] + distance
    return found


def svg(chart: Chart, height: float, drawn: Iterable[str]) -> str:
    """Return a figure."""
    head = f'<svg viewBox="0 0 {WIDTH} {n(height)}" role="img" aria-label="{html.escape(plain(chart.title))}">'
    return f"{head}{''.join(drawn)}</svg>"


def legend(entries: Sequence[tuple[int, str, str]]) -> str:
    """Return a list of colours with their names; empty without entries.

    :param entries: for each colour its number, the class of its dash (empty for an area), and its name.
    """
    items = []
    for number, dash, label in entries:
        kind = color(number)
        swatch = (
            mark("path", f"{kind} line {dash}", d="M0 5h26")
            if dash
            else mark("rect", f"{kind} bar", width=10, height=10)
        )
        items.append(f'<li><svg width="{26 if dash else 10}" height="10" aria-hidden="true">{swatch}</svg>')
        items.append(f"{html.escape(plain(label))}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


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


def mark(tag: str, kind: str, *said: str, inside: str = "", **attributes: float | str) -> str:
    """Return an element of a class.

    :param said: the lines of its title.
    """
    given = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, str) else n(value)}"'
        for name, value in attributes.items()
    )
    title = f"<title>{html.escape(chr(10).join(map(plain, said)))}</title>" if said else ""
    content = title + inside
    return f'<{tag} class="{kind}"{given}>{content}</{tag}>' if content else f'<{tag} class="{kind}"{given}/>'


def text(x: float, y: float, words: str, kind: str = "", *, whole: str = "", turned: int = 0) -> str:
    """Return a text.

    :param whole: the text before it was cut, for a title.
    :param turned: the degrees by which it is turned around its place.
    """
    if not words:
        return ""
    said = [whole] if whole and plain(whole) != words else []
    place = {"x": n(x), "y": n(y)} | ({"transform": f"rotate({turned} {n(x)} {n(y)})"} if turned else {})
    return mark("text", kind, *said, inside=html.escape(plain(words)), **place)


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
