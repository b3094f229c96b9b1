"""Progress of a running sweep: a bar for each run on a terminal and in a notebook, elsewhere one line a minute."""

from __future__ import annotations

import html
import io
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedcore.tools import output
from fedcore.tools import rounds as recorded
from fedcore_study.comparisons.cautions import in_a_round

PERIOD = 60.0
"""Seconds between two lines where there is no terminal."""

REDRAWN = 0.25
"""The least seconds between two drawings in a notebook while runs only advance."""


class _Run:
    """A run that is under way."""

    def __init__(self, name: str, rounds: int, began: float) -> None:
        self.name, self.rounds = name, rounds
        self.began = self.last = began
        self.first = self.done = 0
        self.selected = self.failed = 0  # clients, over the rounds
        self.shown: str | None = None
        self.protocol: str | None = None

    def left(self, now: float) -> float | None:
        """Return the seconds that are left if the rounds go on as fast as until now; None before the first."""
        trained = self.done - self.first
        return (now - self.began) / trained * (self.rounds - self.done) if trained else None

    def figure(self) -> str:
        """Return the last figure, with its protocol unless that is ``global``: methods have different ones."""
        protocol = f"{self.protocol} " if self.protocol not in (None, "global") else ""
        return f"{protocol}{self.shown}"

    def words(self, now: float) -> str:
        """Return how far the run is."""
        parts = [f"{self.done}/{self.rounds} rounds"]
        parts += [self.figure()] if self.shown is not None else []
        left = self.left(now)
        return ", ".join(parts + ([f"{output.duration(left)} left"] if left else []))


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
        self._noted: set[str] = set()
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

    def __exit__(self, *raised: object) -> None:
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
                self._tasks[name] = self._bars.add_task(output.clean(name), total=self._asked[name], words="")
            elif event in ("begun", "round") and name in self._running:
                self._advanced(self._running[name], event, details)
            elif event == "done" and name in self._running:
                self._running[name].shown, self._running[name].protocol = details["figure"], details["protocol"]
            elif event == "note":
                self._note(f"{name}: {details['note']}")
            elif event in ("finished", "failed", "stopped"):
                self._has_ended(name, event, details)
            self._show_total()

    def status(self) -> str:
        """Return how far the sweep is, in one line."""
        with self._turn:
            now = self.clock()
            running = [f"{run.name}: {run.words(now)}" for run in self._running.values()]
            return "; ".join([f"all runs: {self._words()}", *running])

    def _planned(self, details: Mapping[str, Any]) -> None:
        self.total, self.parallel, self._asked = len(details["left"]), details["parallel"], details["rounds"]
        self._waiting = {name: self._asked[name] for name in details["left"]}
        done = len(details["runs"]) - self.total
        if not self.total:
            return
        if done and not self.quiet:
            self._note(f"{done} of {len(details['runs'])} runs are finished already")
        if details["longer"] and not self.quiet:
            self._note(f"{len(details['longer'])} finished runs go on to more rounds, as with resume --rounds")
        self._print(f"{self.total} runs, {details['parallel']} at a time, in {details['out']}")
        self._tasks[""] = self._bars.add_task("all runs", total=self.total, words="")

    def _advanced(self, run: _Run, event: str, details: Mapping[str, Any]) -> None:
        if event == "begun":
            run.first = run.done = details["round"]
            run.began = run.last = self.clock()
            for note in [note for note in details["notes"] if note not in self._noted]:  # most concern many runs
                self._noted.add(note)
                self._note(f"{run.name}: {note}")
            return
        now, rounds = self.clock(), details["round"] - run.done
        self._seconds, self._rounds = self._seconds + now - run.last, self._rounds + rounds
        run.done, run.last = details["round"], now
        if details.get("figure") is not None:
            run.shown, run.protocol = details["figure"], details.get("protocol")
        run.selected, run.failed = run.selected + details["clients"], run.failed + recorded.errors(details["lost"])
        self._bars.update(self._tasks[run.name], completed=run.done, words=run.words(now))

    def _has_ended(self, name: str, event: str, details: Mapping[str, Any]) -> None:
        self._bars.remove_task(self._tasks.pop(name))
        run = self._running.pop(name)
        self.finished += event == "finished"
        self.failed += event == "failed"
        figure = f", {run.figure()}" if event == "finished" and run.shown is not None else ""
        if event == "finished" and run.failed:
            figure += f", clients failed: {in_a_round(run.failed, run.selected, run.done - run.first)}"
        why = f": {details['message']}" if details["message"] else ""
        ended = self.total - len(self._waiting) - len(self._running)
        self._print(f"{event} {name} after {output.duration(details['seconds'])}{figure} ({ended}/{self.total}){why}")

    def _left(self) -> float | None:
        """Return the seconds that are left for all runs if rounds take as long as until now."""
        if not self._rounds:
            return None
        rounds = sum(self._waiting.values()) + sum(run.rounds - run.done for run in self._running.values())
        return self._seconds / self._rounds * rounds / self.parallel

    def _show_total(self) -> None:
        if "" in self._tasks:
            self._bars.update(self._tasks[""], completed=self.finished + self.failed, words=self._words())

    def _words(self) -> str:
        """Return how many runs have ended, and the time that is left."""
        left = self._left()
        words = f"{self.finished}/{self.total} finished" + (f", {self.failed} failed" if self.failed else "")
        return words + (f", about {output.duration(left)} left" if left else "")

    def _tell(self) -> None:
        """Print the status once a minute until the sweep ends."""
        while not self._ended.wait(PERIOD):
            if self._running:
                self._print(self.status())

    def _print(self, line: str) -> None:
        if not self.quiet:
            self.console.print(output.text(line), soft_wrap=True)

    def _note(self, message: str) -> None:
        output.note(message, self.console)


class NotebookSweepDisplay(SweepDisplay):
    """Redraws an output below the cell.

    :param draw: replaces the output by a piece of HTML.
    """

    def __init__(self, draw: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Console(file=io.StringIO()), clock=clock)
        self._lines, self.draw, self._drawn = False, draw, clock()
        self._said: list[str] = []
        self._notes: list[str] = []

    def __exit__(self, *raised: object) -> None:
        """Draw how the sweep ended."""
        super().__exit__(*raised)
        if raised[0] is None or self._said:
            self.draw(self.page())

    def __call__(self, name: str, event: str, details: Mapping[str, Any]) -> None:
        """Take an event, and draw unless the last drawing is fresh."""
        super().__call__(name, event, details)
        if event != "round" or self.clock() - self._drawn >= REDRAWN:
            self._drawn = self.clock()
            self.draw(self.page())

    def page(self) -> str:
        """Return the present state as HTML: all runs, those that are under way, those that failed, and the others."""
        now, ended = self.clock(), self.finished + self.failed
        title, *messages = map(html.escape, self._said or ["all runs are finished already"])
        rows = [_row("all runs", ended, self.total, self._words())] if self.total else []
        rows += [_row(run.name, run.done, run.rounds, run.words(now)) for run in self._running.values()]
        failed = [line for line in messages if not line.startswith("finished")]
        done = [line for line in messages if line.startswith("finished")]
        others = f"<details><summary>{len(done)} finished</summary>{'<br>'.join(done)}</details>" if done else ""
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self._notes)
        lines = "".join(f"<p>{line}</p>" for line in failed)
        return f"<div><b>{title}</b><table>{''.join(rows)}</table>{lines}{others}{notes}</div>"

    def _print(self, line: str) -> None:
        self._said.append(line)

    def _note(self, message: str) -> None:
        self._notes.append(message)


def _row(name: str, done: int, most: int, words: str) -> str:
    shown = (html.escape(output.clean(name)), f"<progress value='{done}' max='{most}'></progress>", html.escape(words))
    cells = "".join(f'<td style="text-align:left">{cell}</td>' for cell in shown)
    return f"<tr>{cells}</tr>"


def script_display(*, quiet: bool) -> SweepDisplay:
    """Return the display of a sweep that a program starts: that of a notebook, of a terminal, or a line a minute."""
    from fedcore_console import notebook_output  # here: it imports torch

    draw = None if quiet else notebook_output()
    return SweepDisplay(output.stderr(), quiet=quiet) if draw is None else NotebookSweepDisplay(draw)
