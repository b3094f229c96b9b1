"""Charts as plain values, titles and captions, for every renderer. Imports only the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

COINCIDE = 0.01
"""Lines nearer to one another than this part of the values' range cannot be told apart in a picture."""

Grid: TypeAlias = "list[list[float | None]]"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of the report.

    :param name: becomes a file's name. ``about`` is the caption: what is drawn, in one or two sentences.
    """

    name: str
    title: str
    about: str = ""


@dataclass(frozen=True)
class Line:
    """Mean of several runs over rounds, with their standard deviation where there are at least two.

    :param color: number of the line's colour; the same row has the same in all charts.
    :param tails: what single runs go on with where the others have stopped: (x, y) each, from the last common x.
    """

    label: str
    color: int
    x: list[float]
    y: list[float]
    std: list[float]
    runs: int
    tails: list[tuple[list[float], list[float]]] = field(default_factory=list)

    def band(self, log: bool) -> tuple[list[float], list[float]]:
        """Return the lower and the upper end of the deviation at each x; empty for a single run.

        On a logarithmic axis the lower end stays above zero: at a hundredth of the mean.
        """
        pairs = list(zip(self.y, self.std, strict=False))
        low = [max(y - s, 0.01 * y) if log else y - s for y, s in pairs]
        return low, [y + s for y, s in pairs]


@dataclass(frozen=True, kw_only=True)
class Curves(Chart):
    """Lines with deviation bands; ``log`` for values that differ by orders of magnitude.

    :param rounds: whether x counts rounds, whole numbers that all lines share.
    """

    x_title: str
    y_title: str
    lines: list[Line]
    log: bool = False
    rounds: bool = True

    @property
    def covers(self) -> list[int]:
        """For each line, how many lines before it have nearly its values: it is drawn over these, with gaps."""
        values = [y for line in self.lines for y in line.y]
        reach = (max(values) - min(values) if values else 0.0) * COINCIDE
        return [
            sum(_coincide(line, before, reach) for before in self.lines[:number])
            for number, line in enumerate(self.lines)
        ]


def _coincide(one: Line, other: Line, reach: float) -> bool:
    """Whether one of two lines would hide most of the other: half of their common points are within ``reach``."""
    theirs = dict(zip(other.x, other.y, strict=True))
    near = [abs(y - theirs[x]) <= reach for x, y in zip(one.x, one.y, strict=True) if x in theirs]
    return bool(near) and 2 * sum(near) >= len(near)


@dataclass(frozen=True)
class Box:
    """A distribution: single ``values`` with what each is, or seven quantiles 0, 10, 25, 50, 75, 90, 100 %."""

    label: str
    color: int
    values: list[float]
    names: list[str]
    quantiles: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Boxes(Chart):
    """Distributions beside one another."""

    y_title: str
    boxes: list[Box]


@dataclass(frozen=True, kw_only=True)
class Heatmap(Chart):
    """Numbers in a grid, by colour; ``layers`` are grids of one shape, of which one is shown at a time.

    :param root: shade by the square root, which lifts small numbers. ``digits``: how many decimals to write.
    """

    x_title: str
    y_title: str
    columns: list[str]
    rows: list[str]
    layers: dict[str, Grid]
    unit: str
    root: bool = False
    digits: int = 0

    def shade(self, value: float | None) -> float | None:
        """Return where a value stands on the scale of colours."""
        return value if value is None or not self.root else math.sqrt(value)

    def written(self, value: float | None) -> str:
        """Return a value as it stands in its cell; nothing is left blank where numbers are counts."""
        return "" if value is None or (self.root and not value) else f"{value:.{self.digits}f}"

    @property
    def scale(self) -> tuple[float, float]:
        """Where the scale of colours begins and ends: counts at 0, percentages at the ten below the smallest."""
        values = [v for grid in self.layers.values() for row in grid for v in row if v is not None]
        if self.root:
            return 0.0, math.sqrt(max([1.0, *values]))
        return min(90.0, 10 * math.floor(min(values, default=0.0) / 10)), 100.0

    @property
    def ticks(self) -> list[float] | None:
        """Values to name on the scale of counts."""
        return [self.scale[1] ** 2 * share for share in (0, 0.05, 0.25, 0.5, 1)] if self.root else None

    @property
    def roomy(self) -> bool:
        """Whether the numbers can be written into the cells."""
        return len(self.columns) <= 16 and len(self.rows) <= 40


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


Figure: TypeAlias = "Chart | Omitted"


def plain(value: object) -> str:
    """Return a text from a file in one line without control characters."""
    return "".join(c if c.isprintable() else "�" for c in str(value).replace("\n", " "))


def number(value: Any) -> float | None:
    """Return a finite number from a file, else None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def legible(labels: Sequence[str], most: int = 40) -> list[str]:
    """Return labels in one line each, truncated to a length that is readable on an axis."""
    cleaned = [plain(label) for label in labels]
    return [label if len(label) <= most else label[: most - 1] + "…" for label in cleaned]
