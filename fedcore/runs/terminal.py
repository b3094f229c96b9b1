"""Progress of a run: a line per round, or nothing; by a package of displays also live.

A display of a package is a function behind an entry point of the group ``fedcore.displays``. It takes the console and
returns a :class:`~fedcore.runs.progress.Progress`, or None where it does not suit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from fedcore.base import registry
from fedcore.base.output import clean, duration, note, number, stderr, text
from fedcore.runs import rounds
from fedcore.runs.progress import Progress, only_notes


def make_display(console: Console, *, quiet: bool = False) -> Progress:
    """Return the display for a console; commands use the console of stderr."""
    return Display(console) if quiet else _of_a_package(console) or PlainDisplay(console)


def script_display() -> Progress:
    """Return the display of a run that a program starts: that of a package, or a line a minute."""
    console = stderr()
    return _of_a_package(console) or MinuteDisplay(console)


def _of_a_package(console: Console) -> Progress | None:
    """Return the first display of a package that suits."""
    offers = (registry.resolve("display", name)(console) for name in registry.available("display"))
    return next((display for display in offers if display is not None), None)


class Display(Progress):
    """Prints a run's notes only."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self.console = console

    def started(self, details: Mapping[str, Any]) -> None:
        """Print the notes of the start."""
        for message in details["notes"]:
            self.noted(message)

    def noted(self, message: str) -> None:
        """Print the note."""
        note(message, self.console)


class PlainDisplay(Display):
    """A line per round, for files and pipes."""

    def started(self, details: Mapping[str, Any]) -> None:
        """Print the run's headline and notes."""
        self._print(text(self.headline))
        super().started(details)

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Print one line for the round and one per kind of failure."""
        parts = [f"round {self.done}/{self.rounds}"]
        parts += [f"{name} {value}" for name, value in rounds.percentages(record).items()]
        parts += [f"{clean(name)} {number(value)}" for name, value in rounds.losses(record)]
        if "system" in record:
            system = record["system"]
            words = rounds.in_words(
                len(record["cohort"]), record["accepted"], len(system["partial"]), rounds.lost(record)
            )
            parts.append(f"{clean(words)}, {duration(system['seconds'])} virtual")
        elif failed := rounds.lost(record).total():
            parts.append(f"{failed} of {len(record['cohort'])} clients failed")
        parts.append(f"{duration(rounds.seconds(record))}/round")
        if self.left:
            parts.append(f"{duration(self.left)} left")
        self._print(Text("  ".join(parts)))
        for line in rounds.failures(record):
            self._print(Text(f"  {line}"))

    def _print(self, line: Text) -> None:
        self.console.print(line, soft_wrap=True)


class MinuteDisplay(PlainDisplay):
    """At most a line a minute, for scripts whose output goes to a file. Notes are warnings, as without a display."""

    def started(self, details: Mapping[str, Any]) -> None:
        """Remember the headline: a run of less than a minute prints nothing."""
        self._headline, self._printed = self.headline, self.clock()
        Display.started(self, details)

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Print the round if the last line is a minute old."""
        if self.clock() - self._printed >= 60.0:
            if self._headline:
                self._print(text(self._headline))
            self._headline, self._printed = "", self.clock()
            super().round_done(record)

    def noted(self, message: str) -> None:
        """Warn."""
        only_notes("note", {"message": message})
