"""Progress of a running sweep: a bar for each run on a terminal, elsewhere one line a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedcore.base.output import clean, duration, note, percent, text

PERIOD = 60.0
"""Seconds between two lines where there is no terminal."""


class _Run:
    """A run that is under way."""

    def __init__(self, name: str, rounds: int, began: float) -> None:
        self.name, self.rounds = name, rounds
        self.began = self.last = began
        self.first = self.done = 0
        self.accuracy: float | None = None

    def left(self, now: float) -> float | None:
        """Return the seconds that are left if the rounds go on as fast as until now; None before the first."""
        trained = self.done - self.first
        return (now - self.began) / trained * (self.rounds - self.done) if trained else None

    def words(self, now: float) -> str:
        """Return how far the run is."""
        parts = [f"{self.done}/{self.rounds} rounds"]
        parts += [f"{percent(self.accuracy)} %"] if self.accuracy is not None else []
        left = self.left(now)
        return ", ".join(parts + ([f"{duration(left)} left"] if left else []))


class SweepDisplay:
    """Listens to a sweep."""

    def __init__(self, console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.quiet, self.clock = console, quiet, clock
        self.total, self.parallel, self.finished, self.failed = 0, 1, 0, 0
        self._asked: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._running: dict[str, _Run] = {}
        self._seconds, self._rounds = 0.0, 0  # of the rounds until now
        self._tasks: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[words]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._lines = not quiet and not console.is_terminal
        self._ended = threading.Event()
        self._turn = threading.RLock()

    def __enter__(self) -> Self:
        """Begin to show."""
        self._bars.start()
        if self._lines:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it should be."""
        self._ended.set()
        self._bars.stop()

    def __call__(self, name: str, event: str, details: Mapping[str, Any]) -> None:
        """Take an event."""
        with self._turn:
            if event == "plan":
                self._planned(details)
            elif event == "start":
                self._running[name] = _Run(name, self._waiting.pop(name), self.clock())
                self._tasks[name] = self._bars.add_task(clean(name), total=self._asked[name], words="")
            elif event in ("begun", "round") and name in self._running:
                self._advanced(self._running[name], event, details)
            elif event == "note":
                note(f"{name}: {details['note']}", self.console)
            elif event in ("finished", "failed", "stopped"):
                self._has_ended(name, event, details)
            self._show_total()

    def status(self) -> str:
        """Return how far the sweep is, in one line."""
        with self._turn:
            now, parts = self.clock(), [f"{self.finished} of {self.total} runs finished"]
            parts += [f"{self.failed} failed"] if self.failed else []
            parts += [f"{run.name}: {run.words(now)}" for run in self._running.values()]
            left = self._left()
            return "; ".join(parts + ([f"about {duration(left)} left"] if left else []))

    def _planned(self, details: Mapping[str, Any]) -> None:
        self.total, self.parallel, self._asked = len(details["left"]), details["parallel"], details["rounds"]
        self._waiting = {name: self._asked[name] for name in details["left"]}
        done = len(details["runs"]) - self.total
        if not self.total:
            return
        if done and not self.quiet:
            note(f"{done} of {len(details['runs'])} runs are finished already", self.console)
        if details["longer"] and not self.quiet:
            note(f"{len(details['longer'])} finished runs go on to more rounds, as with resume --rounds", self.console)
        self._print(f"{self.total} runs, {details['parallel']} at a time, in {details['out']}")
        self._tasks[""] = self._bars.add_task("all runs", total=self.total, words="")

    def _advanced(self, run: _Run, event: str, details: Mapping[str, Any]) -> None:
        if event == "begun":
            run.first = run.done = details["round"]
            run.began = run.last = self.clock()
            return
        now, rounds = self.clock(), details["round"] - run.done
        self._seconds, self._rounds = self._seconds + now - run.last, self._rounds + rounds
        run.done, run.last, run.accuracy = details["round"], now, details.get("accuracy") or run.accuracy
        self._bars.update(self._tasks[run.name], completed=run.done, words=run.words(now))

    def _has_ended(self, name: str, event: str, details: Mapping[str, Any]) -> None:
        self._bars.remove_task(self._tasks.pop(name))
        run = self._running.pop(name)
        self.finished += event == "finished"
        self.failed += event == "failed"
        accuracy = f", {percent(run.accuracy)} %" if event == "finished" and run.accuracy is not None else ""
        why = f": {details['message']}" if details["message"] else ""
        ended = self.total - len(self._waiting) - len(self._running)
        self._print(f"{event} {name} after {duration(details['seconds'])}{accuracy} ({ended}/{self.total}){why}")

    def _left(self) -> float | None:
        """Return the seconds that are left for all runs if rounds take as long as until now."""
        if not self._rounds:
            return None
        rounds = sum(self._waiting.values()) + sum(run.rounds - run.done for run in self._running.values())
        return self._seconds / self._rounds * rounds / self.parallel

    def _show_total(self) -> None:
        if "" in self._tasks:
            left = self._left()
            words = f"{self.finished}/{self.total} finished" + (f", {self.failed} failed" if self.failed else "")
            words += f", about {duration(left)} left" if left else ""
            self._bars.update(self._tasks[""], completed=self.finished + self.failed, words=words)

    def _tell(self) -> None:
        """Print the status once a minute until the sweep ends."""
        while not self._ended.wait(PERIOD):
            if self._running:
                self._print(self.status())

    def _print(self, line: str) -> None:
        if not self.quiet:
            self.console.print(text(line), soft_wrap=True)
