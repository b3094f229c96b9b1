"""Progress of a run in a notebook: one output that is redrawn with IPython's own display."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fedcore.runs.records import accuracies
from fedcore.runs.result import headline, learning_curve

REDRAWN = 0.25
"""The least seconds between two drawings within a round."""


def notebook_display() -> NotebookDisplay | None:
    """Return a display if this process is a notebook's kernel; None in a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if getattr(shell, "kernel", None) is None:
        return None
    shown = import_module("IPython.display")
    handle = shown.display(shown.HTML(""), display_id=True)
    return NotebookDisplay(lambda page: handle.update(shown.HTML(page)))


class NotebookDisplay:
    """Follows a run's events; ``run`` takes an instance as ``notify``.

    :param draw: replaces the output by a piece of HTML.
    """

    def __init__(self, draw: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.draw, self.clock = draw, clock
        self.began = self.drawn = self.first_ended = clock()
        self.title, self.status = "", "starting"
        self.rounds, self.done, self.cohort, self.clients, self.failed = 1, 0, 1, 0, 0
        self.records: list[Mapping[str, Any]] = []
        self.notes: list[str] = []

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Handle an event of the run; unknown events are ignored."""
        if event == "start":
            config = details["config"]
            self.title, self.done = headline(config), details["round"]
            self.rounds, self.cohort = config.rounds, config.cohort_size
            self.notes += details.get("notes", ())
        elif event == "client":
            self.clients += 1
            self.failed += bool(details["failed"])
            if self.clock() - self.drawn < REDRAWN:
                return
        elif event == "round":
            self.records.append(details)
            if len(self.records) == 1:
                self.first_ended = self.clock()
            self.done, self.clients = details["round"] + 1, 0
        elif event == "note":
            self.notes.append(details["message"])
        if event in ("done", "stopped"):
            self.status = {"done": "done", "stopped": "interrupted"}[event]
        elif self.title:
            clients = min(self.clients, self.cohort)
            self.status = f"round {min(self.done + 1, self.rounds)}: {clients}/{self.cohort} clients"
        self.drawn = self.clock()
        self.draw(self.page())

    def page(self) -> str:
        """Return the present state as HTML."""
        times = f"{self.clock() - self.began:.0f} s"
        if len(self.records) > 1 and self.status != "done":  # the first round also starts the workers
            left = (self.clock() - self.first_ended) / (len(self.records) - 1) * (self.rounds - self.done)
            times += f", about {left:.0f} s left"
        if self.failed:
            times += f"; {self.failed} clients failed"
        done = self.done + (self.clients / max(1, self.cohort) if self.done < self.rounds else 0)
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        curve = learning_curve(accuracies(self.records), self.rounds)
        return (
            f"<div><b>{html.escape(self.title)}</b> <progress value='{done:.2f}' max='{self.rounds}'></progress> "
            f"{min(self.done, self.rounds)}/{self.rounds} rounds, {html.escape(self.status)}, {times}{notes}"
            f"{curve if self.status != 'done' else ''}</div>"
        )
