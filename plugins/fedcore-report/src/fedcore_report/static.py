"""Charts as PNG or PDF for papers, by matplotlib."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fedcore.base.files import replacing, storing
from fedcore_report.charts import Bars, Boxes, Chart, Curves, Heatmap, Intervals, Scatter, color, legible, turn

_WIDTH = 5.0  # inches; it is still legible in a paper's column of 3.3 inches
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "pdf.fonttype": 42,  # some journals refuse fonts of Type 3, which are the default
    "savefig.dpi": 200,
    "legend.frameon": False,
    "text.parse_math": False,  # names may hold dollar signs
}
_DASHES = ("-", "--", ":", "-.")
_SHADES = ("#f4f6f9", "#9cc3e6", "#3b82c4", "#1c4f86", "#0b2547")  # from none to the largest number
_MARKERS = ("o", "s", "D", "x", "^", "*")


def write(charts: Iterable[tuple[str, Chart]], folder: Path, form: str) -> list[Path]:
    """Write charts as files of a format, named by group and chart; return the files.

    :raises StorageError: the folder cannot be written.
    """
    written: list[Path] = []
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for group, chart in charts:
            stem = _file_name("-".join(part for part in (group, chart.name) if part))
            taken = sum(path.stem == stem or path.stem.startswith(f"{stem}.") for path in written)
            written.append(folder / f"{stem}{f'.{taken + 1}' if taken else ''}.{form}")
            save(chart, written[-1])
    return written


def save(chart: Chart, file: Path) -> None:
    """Draw one chart into a file, whose name says its format."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as an empty box
        _figure(chart).savefig(file)


def save_svg(chart: Chart, file: Path, *, description: str) -> None:
    """Draw one chart into an SVG file without a date, whose bits depend only on the chart and on matplotlib.

    :param description: for the file's metadata.
    """
    style = {**_STYLE, "svg.fonttype": "none", "svg.hashsalt": "fedcore"}
    with mpl.rc_context(style), replacing(file, sync=False) as temporary:
        metadata = {"Date": None, "Description": description}
        _figure(chart).savefig(temporary, format="svg", metadata=metadata)


def _figure(chart: Chart) -> Figure:
    figure = Figure(figsize=_size(chart), layout="constrained")
    draw(chart, figure.add_subplot())
    return figure


def _size(chart: Chart) -> tuple[float, float]:
    if isinstance(chart, Heatmap):
        return max(_WIDTH, min(14.0, 0.32 * len(chart.columns))), max(1.6, min(16.0, 0.8 + 0.26 * len(chart.rows)))
    if isinstance(chart, Bars):
        return _WIDTH, 1.4 + 0.28 * len(chart.bars)
    if isinstance(chart, Intervals):
        return _WIDTH, 1.0 + 0.35 * len(chart.rows)
    if isinstance(chart, Boxes):
        return max(_WIDTH, 0.7 * len(chart.boxes)), 3.2
    return _WIDTH, 3.2


@functools.singledispatch
def draw(chart: Chart, axes: Axes) -> None:
    """Draw a chart into axes, which are the only ones of their figure."""
    raise TypeError(f"no way to draw {type(chart).__name__}")


@draw.register
def _(chart: Curves, axes: Axes) -> None:
    for line, covers, dash in zip(chart.lines, chart.covers, chart.dashes, strict=True):
        style: dict[str, Any] = {"color": color(line.color)}
        label = legible(line.label)
        if line.x:
            # A line over others is thinner and has gaps and rings, so that they can be seen.
            marks: dict[str, Any] = {"linewidth": 1.4, "marker": "o" if len(line.x) == 1 else None}
            if covers:
                marks = {"linewidth": 1.1, "marker": "o", "markersize": 3 + 2 * covers, "markerfacecolor": "none"}
                marks["markevery"] = max(1, len(line.x) // 12)
            axes.plot(line.x, line.y, label=label, linestyle=_DASHES[dash], **marks, **style)
        low, up = chart.band(line)
        if len(low) > 1:
            axes.fill_between(line.x, low, up, alpha=0.18, linewidth=0, **style)
        for number, (xs, ys) in enumerate(line.tails):
            only = label if not line.x and not number else None
            axes.plot(xs, ys, linestyle=":", linewidth=0.9, label=only, **style)
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title, yscale="log" if chart.log else "linear")
    if chart.rounds:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.log:  # matplotlib's own labels need the mathematics that _STYLE turns off
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend()


@draw.register
def _(chart: Boxes, axes: Axes) -> None:
    stats: list[dict[str, Any]] = []
    for box in chart.boxes:
        low, first, median, third, high = box.five
        found = {"whislo": low, "q1": first, "med": median, "q3": third, "whishi": high, "fliers": []}
        stats.append({**found, "label": legible(box.label, 24)})
    drawn = axes.bxp(stats, patch_artist=True, medianprops={"color": "black"})
    for patch, box in zip(drawn["boxes"], chart.boxes, strict=True):
        patch.set(facecolor=color(box.color), alpha=0.6)
    if sum(len(stat["label"]) for stat in stats) > 50:
        axes.tick_params(axis="x", rotation=30)
    axes.set(ylabel=chart.x_title)


@draw.register
def _(chart: Intervals, axes: Axes) -> None:
    if chart.differences:
        axes.axvline(0, color="grey", linewidth=0.8)
    for place, row in enumerate(chart.rows):
        style: dict[str, Any] = {"color": color(row.color)}
        axes.plot(list(row.each.values()), [place + 0.25] * len(row.each), "o", fillstyle="none", markersize=4, **style)
        axes.plot(row.mean, place, "o", markersize=6, **style)
        if row.ends is not None:
            axes.plot(row.ends, [place, place], linewidth=2, **style)
    axes.set_yticks(range(len(chart.rows)), labels=[legible(row.label) for row in chart.rows])
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.set(xlabel=chart.x_title)


@draw.register
def _(chart: Heatmap, axes: Axes) -> None:
    nan = float("nan")
    shades = [[nan if value is None else chart.shade(value) for value in row] for row in chart.grid]
    least, most = chart.scale
    drawn = axes.pcolormesh(
        shades,
        cmap=LinearSegmentedColormap.from_list("shades", _SHADES),
        vmin=least,
        vmax=most,
        edgecolors="white",
        linewidth=0.5 if len(chart.columns) <= 60 else 0,
    )
    axes.invert_yaxis()
    if chart.roomy:
        for y, row in enumerate(chart.grid):
            for x, value in enumerate(row):
                if value is not None:
                    ink = "white" if chart.shade(value) - least > 0.45 * (most - least) else "black"
                    text = chart.written(value)
                    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink, fontsize=7)
    else:
        bar = axes.figure.colorbar(drawn, ax=axes, label=chart.unit)
        if chart.root:
            ticks = [most**2 * share for share in (0, 0.05, 0.25, 0.5, 1)]
            bar.set_ticks(list(map(chart.shade, ticks)), labels=[f"{tick:.0f}" for tick in ticks])
    for axis, names, most_names in ((axes.xaxis, chart.columns, 30), (axes.yaxis, chart.rows, 60)):
        step = -(-len(names) // most_names)
        axis.set_ticks(
            [i + 0.5 for i in range(0, len(names), step)], labels=[legible(name, 24) for name in names[::step]]
        )
    if sum(map(len, chart.columns[:30])) > 60:
        axes.tick_params(axis="x", rotation=60)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)


@draw.register
def _(chart: Bars, axes: Axes) -> None:
    left = [0.0] * len(chart.bars)
    places = range(len(chart.bars))
    for number, part in enumerate(chart.parts):
        axes.barh(places, part.values, left=left, color=color(number), label=legible(part.label), height=0.7)
        left = [a + b for a, b in zip(left, part.values, strict=True)]
    axes.set_yticks(places, labels=list(map(legible, chart.bars)))
    axes.invert_yaxis()
    axes.set(xlabel=chart.x_title)
    axes.figure.legend(loc="outside lower center", ncols=4)


@draw.register
def _(chart: Scatter, axes: Axes) -> None:
    for number, group in enumerate(chart.groups):
        marker = _MARKERS[turn(number) % len(_MARKERS)]
        label = legible(group.label, 16)
        axes.scatter(group.x, group.y, s=8, color=color(number), marker=marker, label=label, linewidths=0.5)
    axes.set_axis_off()
    if len(chart.groups) <= 12:
        axes.figure.legend(loc="outside right upper", markerscale=1.5)


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=+-]+", "_", text).strip("._-")[:100] or "figure"
