"""A finished run in Python: its figures, its history and its model, with a short text and a picture for notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fedcore.base.config import RunConfig
from fedcore.base.identity import method, short_name
from fedcore.base.protocols import PROTOCOLS
from fedcore.models import SplitModel
from fedcore.runs.directory import RunDirectory
from fedcore.runs.records import accuracies, evaluated, history_rows

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 118, 10, 34
COLORS = ("#3d7fd6", "#d9822b", "#3a9d62", "#b0569f")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Each protocol has its dashes, so that curves with the same values can be told apart."""

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run."""

    metrics: dict[str, Any]
    """The final figures by protocol, as in ``summary.json``."""
    model: SplitModel
    """The global model, on the CPU, in eval mode."""
    directory: Path
    """The run directory."""
    summary: dict[str, Any]
    """The content of ``summary.json``."""
    config: RunConfig
    """The options of the run; every ``auto`` is resolved."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: everything that was recorded about each round."""
        return RunDirectory(self.directory).read_metrics()

    @property
    def history(self) -> Any:
        """One row per round: losses, bytes, seconds, and the figures of every protocol if the round was evaluated.

        ``report.PLUGIN.NAME`` holds the result of a plugin's hook ``report``.

        It is a pandas DataFrame indexed by round, from 1, if pandas is installed, else a list of dictionaries.
        """
        rows = history_rows(self.records)
        try:
            pandas = import_module("pandas")
        except ImportError:
            return rows
        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def __repr__(self) -> str:
        """Return one line: method, data set, rounds, final accuracy, directory."""
        figures = [f"{name} {100 * row['accuracy']:.2f} %" for name, row in evaluated(self.metrics).items()]
        accuracy = f", accuracy: {', '.join(figures)}" if figures else ""
        return f"<RunResult {headline(self.config)}, {self.summary['rounds']} rounds{accuracy}; {self.directory}>"

    def _repr_html_(self) -> str:
        """Return the final figures and the learning curve, for a notebook."""
        rows = []
        for name, row in evaluated(self.metrics).items():
            loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
            cells = [name, PROTOCOLS[name].heading, f"{100 * row['accuracy']:.2f}", loss]
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        head = "<tr><th>protocol</th><th>of what</th><th>accuracy %</th><th>loss</th></tr>"
        return (
            f"<p><b>{html.escape(headline(self.config))}</b>, {self.summary['rounds']} rounds, "
            f"{self.summary['seconds']:.1f} s</p><table>{head}{''.join(rows)}</table>"
            f"{learning_curve(accuracies(self.records), self.config.rounds)}"
            f"<p><code>{html.escape(str(self.directory))}</code></p>"
        )


def headline(config: RunConfig) -> str:
    """Return a run in a few words: ``moon+fedprox on digits``."""
    return f"{method({short_name(name): None for name in config.plugins})} on {short_name(config.dataset)}"


def learning_curve(curves: Mapping[str, Points], rounds: int) -> str:
    """Return accuracy over rounds as an SVG element; an empty text if nothing was evaluated.

    It uses the page's colour of text, so that it suits dark pages.

    :param curves: protocol -> pairs of a round (from 1) and an accuracy (0 to 1).
    :param rounds: the number of rounds of the whole run, which is the width of the picture.
    """
    values = [100 * accuracy for points in curves.values() for _, accuracy in points]
    if not values:
        return ""
    low, high = 10 * (min(values) // 10), 10 * -(-max(values) // 10)
    high = max(high, low + 10)
    last = max(rounds, 2)

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number - 1) / (last - 1)

    def y(percent: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - percent) / (high - low)

    parts = []
    step = 10 if high - low <= 50 else 20
    for percent in range(int(low), int(high) + 1, step):
        parts.append(_line(LEFT, y(percent), WIDTH - RIGHT, y(percent), 'stroke-opacity="0.2"'))
        parts.append(_text(LEFT - 6, y(percent) + 4, str(percent), "end"))
    for number in sorted({1, (1 + last) // 2, last}):
        parts.append(_text(x(number), HEIGHT - BOTTOM + 16, str(number), "middle"))
    parts.append(_text(x((1 + last) / 2), HEIGHT - 4, "round", "middle"))
    parts.append(
        f'<text x="12" y="{y((low + high) / 2):.1f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {y((low + high) / 2):.1f})">accuracy %</text>'
    )
    for number, (name, points) in enumerate(curves.items()):
        style = f'stroke="{COLORS[number % len(COLORS)]}" stroke-dasharray="{DASHES[number % len(DASHES)]}"'
        path = " ".join(f"{x(position):.1f},{y(100 * accuracy):.1f}" for position, accuracy in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {style}/>')
        if len(points) == 1:
            parts.append(f'<circle cx="{x(points[0][0]):.1f}" cy="{y(100 * points[0][1]):.1f}" r="3" {style}/>')
        top = TOP + 10 + 16 * number
        parts.append(_line(WIDTH - RIGHT + 10, top, WIDTH - RIGHT + 30, top, f'stroke-width="2" {style}'))
        parts.append(_text(WIDTH - RIGHT + 36, top + 4, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'style="max-width:100%;font:11px sans-serif" fill="currentColor" stroke-linecap="round">'
        f"<title>Accuracy over rounds</title>{''.join(parts)}</svg>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    stroke = "" if "stroke=" in style else 'stroke="currentColor" '
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {stroke}{style}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
