"""A run in a notebook: its progress, one output that is redrawn with IPython's own display, and its result."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console

from fedcore import RunResult
from fedcore.tools import PROTOCOLS, Progress, registry, rounds, title
from fedcore_console.words import completed, doing

REDRAWN = 0.25
"""The least seconds between two drawings within a round."""


def show(console: Console) -> NotebookDisplay | None:
    """Return the display of a notebook's kernel; None elsewhere."""
    draw = notebook_output()
    return NotebookDisplay(draw) if draw is not None else None


class NotebookDisplay(Progress):
    """Redraws an output after every event.

    :param draw: replaces the output by a piece of HTML.
    """

    def __init__(self, draw: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self.draw, self.drawn = draw, self.began
        self.title = ""
        self.records: list[Mapping[str, Any]] = []
        self.notes: list[str] = []

    def started(self, details: Mapping[str, Any]) -> None:
        """Draw the run's name and notes."""
        self.title = title(details["config"])
        self.notes += details["notes"]
        self._redraw()

    def client_done(self) -> None:
        """Draw the number of clients, unless the last drawing is fresh."""
        if self.clock() - self.drawn >= REDRAWN:
            self._redraw()

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Draw the learning curve with the round."""
        self.records.append(record)
        self._redraw()

    def noted(self, message: str) -> None:
        """Draw the note."""
        self.notes.append(message)
        self._redraw()

    def ended(self) -> None:
        """Draw how the run ended."""
        self._redraw()

    def _redraw(self) -> None:
        self.drawn = self.clock()
        self.draw(self.page())

    def page(self) -> str:
        """Return the present state as HTML."""
        times = f"{self.clock() - self.began:.0f} s"
        if self.left is not None and self.ending != "done":
            times += f", about {self.left:.0f} s left"
        if failed := self.failed + sum(rounds.errors(rounds.lost(record)) for record in self.records):
            times += f"; {failed} clients failed"
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        curve = _curve(self.records, self.rounds)
        return (
            f"<div><b>{html.escape(self.title)}</b> "
            f"<progress value='{completed(self):.2f}' max='{self.rounds}'></progress> "
            f"{min(self.done, self.rounds)}/{self.rounds} rounds, {doing(self)}, {times}{notes}"
            f"{curve if self.ending != 'done' else ''}</div>"
        )


def result_page(result: RunResult) -> str:
    """Return the final figures of a run as HTML, with fedcore-report also the learning curve."""
    rows = []
    for name, row in rounds.evaluated(result.metrics).items():
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        words, figures = [name, PROTOCOLS[name].heading], [rounds.in_short(row).removesuffix(" %"), loss]
        rows.append(_table_row("td", words, figures))
    records = result.records
    spent = sum(rounds.seconds(record) for record in records if "round" in record)  # whichever process trained them
    head = _table_row("th", ["protocol", "of what"], ["accuracy %" if result.task.classes else "figure", "loss"])
    return (
        f"<p><b>{html.escape(title(result.config))}</b>, {result.summary['rounds']} rounds, "
        f"{spent:.1f} s</p><table>{head}{''.join(rows)}</table>"
        f"{_curve(records, result.config.rounds)}"
        f"<p><code>{html.escape(str(result.directory))}</code></p>"
    )


def _table_row(cell: str, words: Sequence[str], figures: Sequence[str]) -> str:
    """Return a row of a table. Notebooks align all cells to the right, which suits figures alone."""
    left = [f'<{cell} style="text-align:left">{html.escape(word)}</{cell}>' for word in words]
    return f"<tr>{''.join(left)}{''.join(f'<{cell}>{html.escape(figure)}</{cell}>' for figure in figures)}</tr>"


def _curve(records: Sequence[Mapping[str, Any]], most: int) -> str:
    """Return the figure over rounds as an SVG element of fedcore-report; an empty text without that package.

    :param most: the number of rounds of the whole run.
    """
    if "learning-curve" not in registry.available("figure"):
        return ""
    svg: str = registry.resolve("figure", "learning-curve")(records, most)
    return svg


def notebook_output() -> Callable[[str], None] | None:
    """Return what draws HTML below the cell, in place of the HTML before, if this process is a notebook's kernel.

    In a terminal or a script it returns None.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if getattr(shell, "kernel", None) is None:
        return None
    shown = import_module("IPython.display")
    handle = shown.display(shown.HTML(""), display_id=True)
    return lambda page: handle.update(shown.HTML(page))
