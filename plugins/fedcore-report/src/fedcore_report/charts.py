"""Charts as values, titles and captions, which a renderer draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from fedcore_study.tools import joined

COINCIDE = 0.01
"""The part of the values' range below which the distance of two lines is too small to be seen."""

COLORS = (
    "#3b82c4",
    "#e07b22",
    "#3a9d5d",
    "#d9534f",
    "#9467d8",
    "#1fa3a3",
    "#a0724e",
    "#d463a6",
    "#808a94",
    "#9a9d2a",
)
"""Colours of rows, parts and classes, legible on white and on black."""

DASHES = 4
"""The number of kinds of lines: solid ones and three with gaps."""

BANDS = 6
"""The largest number of lines with bands in a chart. More bands would hide one another."""

Grid: TypeAlias = "list[list[float | None]]"


def turn(number: int) -> int:
    """Return how often all colours are used before a number: the number of its dash or marker."""
    return number // len(COLORS)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of the report."""

    name: str
    """The name of a file with this figure."""
    title: str
    about: str = ""
    """The caption, in one or two sentences."""


@dataclass(frozen=True)
class Line:
    """The mean of several runs over rounds, with the standard deviation of two runs or more."""

    label: str
    color: int
    """The number of the line's colour. The same row has the same number in all charts."""
    x: list[float]
    y: list[float]
    std: list[float]
    runs: int
    tails: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Points (x, y) of single runs that go on after the others, from the last common x on."""

    @property
    def parts(self) -> list[tuple[list[float], list[float]]]:
        """The points of the mean, and of each tail."""
        return [(self.x, self.y), *self.tails]


@dataclass(frozen=True, kw_only=True)
class Curves(Chart):
    """Lines with deviation bands."""

    x_title: str
    y_title: str
    lines: list[Line]
    log: bool = False
    """Whether the y axis is logarithmic."""
    rounds: bool = True
    """Whether x counts rounds, which are whole numbers and the same for all lines."""
    ends: Sequence[float] = ()
    """Places on the x axis to show besides the lines' own."""
    least: float = 0.0
    """The smallest range of the y axis, so that small differences look small."""
    diagonal: bool = False
    """Whether both axes are from 0 to 1, with a dashed line where they are equal."""

    def band(self, line: Line) -> tuple[list[float], list[float]]:
        """Return the ends of a line's deviation at each x; empty for a single run, and beyond ``BANDS`` lines.

        On a logarithmic axis the lower end stays above zero: at a hundredth of the mean.
        """
        pairs = list(zip(line.y, line.std, strict=False)) if len(self.lines) <= BANDS else []
        low = [max(y - s, 0.01 * y) if self.log else y - s for y, s in pairs]
        return low, [y + s for y, s in pairs]

    @property
    def dashes(self) -> list[int]:
        """The kind of each line. Lines of one colour have different kinds. Lines that lie on others have gaps."""
        patterns: list[int] = []
        for line, covers in zip(self.lines, self.covers, strict=True):
            first = turn(line.color) + covers
            taken = {
                kind
                for other, kind in zip(self.lines, patterns, strict=False)
                if (other.color - line.color) % len(COLORS) == 0
            }
            kinds = [(first + step) % DASHES for step in range(DASHES)]
            patterns.append(next((kind for kind in kinds if kind not in taken), kinds[0]))
        return patterns

    @property
    def covers(self) -> list[int]:
        """The number of earlier lines that each line mostly hides. A line that hides others is drawn with gaps."""
        return [len(self._below(number)) for number in range(len(self.lines))]

    @property
    def coinciding(self) -> str:
        """A sentence that names the lines that lie on one another from end to end; empty if there are none."""
        sets: list[list[str]] = []
        for number, line in enumerate(self.lines):
            under = self._below(number, 1.0)
            known = next((labels for labels in sets if set(under) & set(labels)), None)
            if known is not None:
                known.append(line.label)
            elif under:
                sets.append([*under, line.label])
        text = "; ".join(f"{joined(labels)} coincide" for labels in sets)
        return f"{text}: the later ones are drawn with gaps." if text else ""

    def _below(self, number: int, share: float = 0.5) -> list[str]:
        """Return the lines before a line that nearly have its values at this share of their common points."""
        values = [y for line in self.lines for y in line.y]
        reach = (max(values) - min(values) if values else 0.0) * COINCIDE
        line = self.lines[number]
        return [before.label for before in self.lines[:number] if _coincide(line, before, reach, share)]

    def once(self) -> Curves:
        """Return the chart with one line for lines of equal values, which its caption names."""
        sets: list[list[Line]] = []
        for line in self.lines:
            alike = (lines for lines in sets if replace(lines[0], label=line.label, color=line.color) == line)
            if (lines := next(alike, None)) is None:
                sets.append([line])
            else:
                lines.append(line)
        named = [[line.label for line in lines] for lines in sets]
        labels = [" = ".join(names) if len(names) < 3 else f"{names[0]} = {len(names) - 1} others" for names in named]
        drawn = [replace(lines[0], label=label) for lines, label in zip(sets, labels, strict=True)]
        same = [f"{joined(names)} have the same line." for names in named if len(names) > 1]
        return replace(self, lines=drawn, about=" ".join([self.about, *same]))

    def last_third(self) -> Curves | None:
        """Return a chart of the last third of the rounds; None if it has fewer than three points."""
        end = max((x for line in self.lines for x in line.x), default=0.0)
        lines = []
        for line in self.lines:
            kept = [place for place, x in enumerate(line.x) if 3 * x >= 2 * end]
            x, y = ([values[place] for place in kept] for values in (line.x, line.y))
            std = [line.std[place] for place in kept] if line.std else []
            lines.append(replace(line, x=x, y=y, std=std, tails=[]))
        lines = [line for line in lines if len(line.x) >= 3]
        if not lines or not self.rounds:
            return None
        about = "The same lines, with axes of their own."
        return replace(self, name=f"{self.name}-end", title=f"{self.title}: last third", about=about, lines=lines)


def _coincide(one: Line, other: Line, reach: float, share: float) -> bool:
    theirs = dict(zip(other.x, other.y, strict=True))
    near = [abs(y - theirs[x]) <= reach for x, y in zip(one.x, one.y, strict=True) if x in theirs]
    return bool(near) and sum(near) >= share * len(near)


@dataclass(frozen=True)
class Box:
    """A distribution: single values, or quantiles if there are too many values."""

    label: str
    color: int
    values: list[float]
    names: list[str]
    """A name for each value."""
    quantiles: list[float] | None = None
    """At 0, 10, 25, 50, 75, 90 and 100 %."""

    @property
    def five(self) -> tuple[float, float, float, float, float]:
        """The lowest value, the quartiles and the highest value."""
        if self.quantiles is not None:
            low, _, first, median, third, _, high = self.quantiles
        else:
            low, first, median, third, high = np.quantile(self.values, (0, 0.25, 0.5, 0.75, 1)).tolist()
        return low, first, median, third, high


@dataclass(frozen=True, kw_only=True)
class Boxes(Chart):
    """Distributions in rows."""

    x_title: str
    boxes: list[Box]
    digits: int = 1
    """The decimal places of values."""


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, and the single values."""

    label: str
    color: int
    mean: float
    ends: tuple[float, float] | None
    """The ends of the interval; None without one."""
    each: dict[str, float]
    """The single values by name."""


@dataclass(frozen=True, kw_only=True)
class Intervals(Chart):
    """Means in rows with their intervals and single values."""

    x_title: str
    rows: list[Interval]
    differences: bool = True
    """Whether the values are differences, which are drawn around zero and with signs."""
    digits: int = 2
    """The decimal places of values."""


@dataclass(frozen=True, kw_only=True)
class Heatmap(Chart):
    """Numbers in a grid of colours."""

    x_title: str
    y_title: str
    columns: list[str]
    rows: list[str]
    grid: Grid
    unit: str
    root: bool = False
    """Whether shades grow with the square root, so that small numbers can be seen."""

    def shade(self, value: float) -> float:
        """Return the place of a value on the scale of colours."""
        return math.sqrt(value) if self.root else value

    def written(self, value: float) -> str:
        """Return the text of a value in its cell. A count of zero is left blank."""
        if self.root and not value:
            return ""
        return f"{value:.0f}" if self.unit else f"{value:.3g}"

    @property
    def scale(self) -> tuple[float, float]:
        """The ends of the scale of colours.

        Counts begin at 0, percentages at the multiple of ten below the least. Other figures have no natural ends.
        """
        values = [v for row in self.grid for v in row if v is not None]
        if self.root:
            return 0.0, math.sqrt(max([1.0, *values]))
        if not self.unit:
            return min(values, default=0.0) - 1e-9, max(values, default=0.0)
        return min(90.0, 10 * math.floor(min(values, default=0.0) / 10)), 100.0

    @property
    def roomy(self) -> bool:
        """Whether the cells have room for numbers."""
        return len(self.columns) <= 12 and len(self.rows) <= 40


@dataclass(frozen=True)
class Part:
    """One part of stacked bars: a value for each bar."""

    label: str
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Horizontal bars of stacked parts."""

    x_title: str
    bars: list[str]
    parts: list[Part]
    totals: list[float]
    """The whole of each bar, with the parts that are too narrow to be drawn."""


@dataclass(frozen=True)
class Points:
    """Points of one class."""

    label: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True, kw_only=True)
class Scatter(Chart):
    """Points in a plane, coloured by class. The axes have no meaning."""

    groups: list[Points]


@dataclass(frozen=True)
class Omitted:
    """A figure that cannot be drawn, and the reason."""

    title: str
    reason: str


def plain(value: object) -> str:
    """Return a value from a file as one line of text without control characters."""
    return "".join(c if c.isprintable() else "�" for c in str(value).replace("\n", " "))


def legible(label: str, most: int = 40) -> str:
    """Return a label as one line. A long label is cut in the middle to a length that is legible on an axis."""
    text, first = plain(label), (most - 1) // 2
    return text if len(text) <= most else f"{text[:first]}…{text[first + 1 - most :]}"


def spaced(count: int, most: int) -> list[int]:
    """Return all of ``count`` positions, or ``most`` (at least 2) evenly spaced ones including both ends."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
