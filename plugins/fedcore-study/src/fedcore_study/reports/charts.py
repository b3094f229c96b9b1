"""Charts as plain values, titles and captions, for every renderer. Imports no renderer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fedcore_study.words import joined

COINCIDE = 0.01
"""Lines nearer to one another than this part of the values' range cannot be told apart in a picture."""

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
"""How many kinds of lines there are: solid ones and three with gaps."""

BANDS = 6
"""Most lines of a chart that have bands, which cover one another."""

Grid: TypeAlias = "list[list[float | None]]"


def turn(number: int) -> int:
    """Return how often the colours have been gone through: the number of a dash or a marker."""
    return number // len(COLORS)


def color(number: int) -> str:
    """Return the colour of a row's, part's or class's number."""
    return COLORS[number % len(COLORS)]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of the report."""

    name: str
    """Becomes a file's name."""
    title: str
    about: str = ""
    """The caption: one or two sentences that say what is drawn."""


@dataclass(frozen=True)
class Line:
    """The mean of several runs over rounds, with their standard deviation where there are at least two."""

    label: str
    color: int
    """The number of the line's colour. The same row has the same number in all charts."""
    x: list[float]
    y: list[float]
    std: list[float]
    runs: int
    tails: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Points (x, y) of single runs beyond the end of the others, from the last common x on."""

    @property
    def parts(self) -> list[tuple[list[float], list[float]]]:
        """The points of the mean, and those of each tail."""
        return [(self.x, self.y), *self.tails]


@dataclass(frozen=True, kw_only=True)
class Curves(Chart):
    """Lines with deviation bands."""

    x_title: str
    y_title: str
    lines: list[Line]
    log: bool = False
    """For values that differ by orders of magnitude."""
    rounds: bool = True
    """Whether x counts rounds: whole numbers that all lines share."""

    def band(self, line: Line) -> tuple[list[float], list[float]]:
        """Return the ends of a line's deviation at each x; empty for a single run, and beyond ``BANDS`` lines.

        On a logarithmic axis the lower end stays above zero: at a hundredth of the mean.
        """
        pairs = list(zip(line.y, line.std, strict=False)) if len(self.lines) <= BANDS else []
        low = [max(y - s, 0.01 * y) if self.log else y - s for y, s in pairs]
        return low, [y + s for y, s in pairs]

    @property
    def dashes(self) -> list[int]:
        """The kind of each line: no two of a colour are alike, and those that lie on others have gaps."""
        found: list[int] = []
        for line, covers in zip(self.lines, self.covers, strict=True):
            first = turn(line.color) + covers
            taken = {
                kind for other, kind in zip(self.lines, found, strict=False) if color(other.color) == color(line.color)
            }
            kinds = [(first + step) % DASHES for step in range(DASHES)]
            found.append(next((kind for kind in kinds if kind not in taken), kinds[0]))
        return found

    @property
    def covers(self) -> list[int]:
        """For each line, how many lines before it would be hidden by it for the most part: it is drawn with gaps."""
        return [len(self._below(number)) for number in range(len(self.lines))]

    @property
    def coinciding(self) -> str:
        """A sentence that names the lines that lie on one another from end to end; empty where none do."""
        sets: list[list[str]] = []
        for number, line in enumerate(self.lines):
            under = self._below(number, 1.0)
            found = next((labels for labels in sets if set(under) & set(labels)), None)
            if found is not None:
                found.append(line.label)
            elif under:
                sets.append([*under, line.label])
        said = "; ".join(f"{joined(labels)} coincide" for labels in sets)
        return f"{said}: the later ones are drawn with gaps." if said else ""

    def _below(self, number: int, share: float = 0.5) -> list[str]:
        """Return the lines before one that have nearly its values at this share of the points that both have."""
        values = [y for line in self.lines for y in line.y]
        reach = (max(values) - min(values) if values else 0.0) * COINCIDE
        line = self.lines[number]
        return [before.label for before in self.lines[:number] if _coincide(line, before, reach, share)]

    def last_third(self) -> Curves | None:
        """Return the last third of the rounds as a chart of its own; None where there are fewer than three points."""
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
    """A distribution: single values, or quantiles where there are too many values."""

    label: str
    color: int
    values: list[float]
    names: list[str]
    """What each value is."""
    quantiles: list[float] | None = None
    """At 0, 10, 25, 50, 75, 90 and 100 %."""

    @property
    def five(self) -> tuple[float, float, float, float, float]:
        """Lowest value, quartiles and highest value."""
        if self.quantiles is not None:
            low, _, first, median, third, _, high = self.quantiles
            return low, first, median, third, high
        ordered = sorted(self.values)

        def at(share: float) -> float:
            place = share * (len(ordered) - 1)
            below = int(place)
            above = min(below + 1, len(ordered) - 1)
            return ordered[below] + (place - below) * (ordered[above] - ordered[below])

        return ordered[0], at(0.25), at(0.5), at(0.75), ordered[-1]


@dataclass(frozen=True, kw_only=True)
class Boxes(Chart):
    """Distributions in rows."""

    x_title: str
    boxes: list[Box]


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, and the values that it is of."""

    label: str
    color: int
    mean: float
    low: float | None
    high: float | None
    each: dict[str, float]
    """The single values by what they are of."""


@dataclass(frozen=True, kw_only=True)
class Intervals(Chart):
    """Means in rows with their intervals and what they are of."""

    x_title: str
    rows: list[Interval]
    differences: bool = True
    """Whether they are differences: around zero, with signs."""


@dataclass(frozen=True, kw_only=True)
class Heatmap(Chart):
    """Numbers in a grid, by colour."""

    x_title: str
    y_title: str
    columns: list[str]
    rows: list[str]
    grid: Grid
    unit: str
    root: bool = False
    """Shade by the square root, which lifts small numbers."""
    digits: int = 0
    """How many decimals to write."""

    def shade(self, value: float | None) -> float | None:
        """Return where a value stands on the scale of colours."""
        return value if value is None or not self.root else math.sqrt(value)

    def written(self, value: float | None) -> str:
        """Return a value as it stands in its cell. A count of zero is left blank."""
        return "" if value is None or (self.root and not value) else f"{value:.{self.digits}f}"

    @property
    def scale(self) -> tuple[float, float]:
        """Where the scale of colours begins and ends: counts at 0, percentages at the ten below the smallest."""
        values = [v for row in self.grid for v in row if v is not None]
        if self.root:
            return 0.0, math.sqrt(max([1.0, *values]))
        return min(90.0, 10 * math.floor(min(values, default=0.0) / 10)), 100.0

    @property
    def roomy(self) -> bool:
        """Whether the numbers can be written into the cells."""
        return len(self.columns) <= 12 and len(self.rows) <= 40


@dataclass(frozen=True)
class Part:
    """One sort of what bars are made of: a value for each bar."""

    label: str
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Horizontal bars, each stacked of parts."""

    x_title: str
    bars: list[str]
    parts: list[Part]


@dataclass(frozen=True)
class Points:
    """Points of one class."""

    label: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True, kw_only=True)
class Scatter(Chart):
    """Points in a plane whose axes mean nothing, coloured by class."""

    groups: list[Points]


@dataclass(frozen=True)
class Omitted:
    """A figure that cannot be drawn, and why."""

    title: str
    reason: str


def plain(value: object) -> str:
    """Return a text from a file in one line without control characters."""
    return "".join(c if c.isprintable() else "�" for c in str(value).replace("\n", " "))


def legible(labels: Sequence[str], most: int = 40) -> list[str]:
    """Return labels in one line each, cut in the middle to a length that is readable on an axis."""
    first = (most - 1) // 2
    cleaned = [plain(label) for label in labels]
    return [text if len(text) <= most else f"{text[:first]}…{text[first + 1 - most :]}" for text in cleaned]
