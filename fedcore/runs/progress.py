"""Progress of a run, followed by its events."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from fedcore.base.config import RunConfig


class Progress:
    """Follows a run's events; ``run`` takes an instance as ``notify``. Subclasses show what they want.

    Rounds are numbered from 1 here. In records and hooks they are numbered from 0.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.directory: Path | None = None
        """The run directory; None before it exists."""
        self.headline = ""
        """The run in one line: methods, data, directory."""
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
            self.headline = headline(details)
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


def noting(notify: Callable[[str, Mapping[str, Any]], None]) -> Callable[[str], None]:
    """Return a function that passes a message to ``notify`` as a note."""
    return lambda message: notify("note", {"message": message})


def only_notes(event: str, details: Mapping[str, Any]) -> None:
    """Warn a caller that passed no ``notify`` of notes, for example that a damaged checkpoint was skipped."""
    notes = details["notes"] if event == "start" else [details["message"]] if event == "note" else []
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=2)


def headline(details: Mapping[str, Any]) -> str:
    """Return a run in one line, from the details of its start: methods, data, optimizer, directory."""
    config = details["config"]
    methods = " + ".join(config.plugins) or "fedavg"
    began = f", from round {details['round'] + 1}" if details["round"] else _optimizer(config)
    counts = f"{config.clients} client{'s' * (config.clients > 1)}, {config.rounds} round{'s' * (config.rounds > 1)}"
    models = ", ".join(config.client_models) or config.model
    where = f"in {details['directory']}"
    return f"{methods} on {config.dataset} ({models}), {config.partition}, {counts}{began}, {where}"


def _optimizer(config: RunConfig) -> str:
    """Return the local optimizer unless it is plain SGD: the defaults surprise who compares with other frameworks."""
    more = [f"momentum {config.momentum:g}"] * (config.momentum > 0 and config.optimizer == "sgd")
    more += [f"weight decay {config.weight_decay:g}"] * (config.weight_decay > 0)
    plain = config.optimizer == "sgd" and not more
    return "" if plain else f", {config.optimizer}" + " with " * bool(more) + " and ".join(more)
