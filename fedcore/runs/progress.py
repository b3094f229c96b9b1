"""Progress of a run, followed by its events; in a notebook, one output that is redrawn with IPython's own display."""

from __future__ import annotations

import html
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Self

from fedcore.runs.records import errors, lost
from fedcore.runs.result import headline, learning_curve

REDRAWN = 0.25
"""The least seconds between two drawings within a round."""


class Progress:
    """Follows a run's events; ``run`` takes an instance as ``notify``. Subclasses show what they want.

    Rounds are numbered from 1 here. In records and hooks they are numbered from 0.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.directory: Path | None = None
        """The run directory; None before it exists."""
        self.rounds, self.done, self.cohort, self.clients, self.failed = 0, 0, 0, 0, 0
        self.ending = ""
        """``done`` or ``interrupted``; empty while the run goes on."""
        self.began = clock()
        self._round_began: float | None = None
        self._pace: deque[float] = deque(maxlen=20)

    def __enter__(self) -> Self:
        """Start the display."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the display, also after an error."""

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Handle an event of the run. Unknown events are ignored."""
        if event == "start":
            self.directory, self.done = details["directory"], details["round"]
            self.rounds, self.cohort = details["config"].rounds, details["config"].cohort_size
            self.started(details)
        elif event == "client":
            self.clients += 1
            self.failed += bool(details["failed"])
            self.client_done()
        elif event == "round":
            now = self.clock()
            if self._round_began is not None:  # the first round also starts the workers: its duration is no estimate
                self._pace.append(now - self._round_began)
            self._round_began, self.clients, self.failed, self.done = now, 0, 0, details["round"] + 1
            self.round_done(details)
        elif event == "note":
            self.noted(details["message"])
        elif event in ("done", "stopped"):
            self.ending = "done" if event == "done" else "interrupted"
            self.ended()

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end, from the last 20 rounds; None before the end of the second round."""
        return median(self._pace) * (self.rounds - self.done) if self._pace else None

    @property
    def completed(self) -> float:
        """The rounds that are done, and the share of the next one's clients that have answered."""
        return min(self.rounds, self.done + min(1.0, self.clients / max(1, self.cohort)))

    @property
    def doing(self) -> str:
        """What the run does now, in a few words."""
        if self.ending or self.directory is None:
            return self.ending or "starting"
        if self.done >= self.rounds:
            return "finishing"
        if self.clients >= self.cohort:
            return f"round {self.done + 1}: evaluating"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"round {self.done + 1}: {self.clients}/{self.cohort} clients{failed}"

    def started(self, details: Mapping[str, Any]) -> None:
        """Show that a run starts or resumes."""

    def client_done(self) -> None:
        """Show that a client has trained or failed."""

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Show a round's record."""

    def noted(self, message: str) -> None:
        """Show a note."""

    def ended(self) -> None:
        """Show that the run is finished or interrupted."""


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
        self.title = headline(details["config"])
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
        if failed := self.failed + sum(errors(lost(record)) for record in self.records):
            times += f"; {failed} clients failed"
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        curve = learning_curve(self.records, self.rounds)
        return (
            f"<div><b>{html.escape(self.title)}</b> "
            f"<progress value='{self.completed:.2f}' max='{self.rounds}'></progress> "
            f"{min(self.done, self.rounds)}/{self.rounds} rounds, {self.doing}, {times}{notes}"
            f"{curve if self.ending != 'done' else ''}</div>"
        )


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


def noting(notify: Callable[[str, Mapping[str, Any]], None]) -> Callable[[str], None]:
    """Return a function that passes a message to ``notify`` as a note."""
    return lambda message: notify("note", {"message": message})


def only_notes(event: str, details: Mapping[str, Any]) -> None:
    """Warn a caller that passed no ``notify`` of notes, for example that a damaged checkpoint was skipped."""
    notes = details["notes"] if event == "start" else [details["message"]] if event == "note" else []
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=2)
