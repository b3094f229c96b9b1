"""Progress of a running sweep: bars on a terminal, elsewhere a line at the start and end of each run."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedcore.base.output import clean, duration, note, text


class SweepDisplay:
    """Listens to a sweep."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.total = self.ended = 0
        self._rounds: dict[str, int] = {}
        self._tasks: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)

    def __enter__(self) -> Self:
        """Begin to show."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it should be."""
        self._bars.stop()

    def __call__(self, name: str, event: str, details: Mapping[str, Any]) -> None:
        """Take an event."""
        if event == "plan":
            self._planned(details)
        elif event == "start":
            self._tasks[name] = self._bars.add_task(clean(name), total=self._rounds[name])
        elif event == "round":
            self._bars.update(self._tasks[name], completed=details["round"])
        elif event == "note":
            note(f"{name}: {details['note']}", self.console)
        elif event in ("finished", "failed", "stopped"):
            self._ended(name, event, details)

    def _planned(self, details: Mapping[str, Any]) -> None:
        self.total, self._rounds = len(details["left"]), details["rounds"]
        done = len(details["runs"]) - self.total
        if not self.total:
            return
        line = f"{self.total} runs, {details['parallel']} at a time, in {details['out']}"
        if done and not self.quiet:
            note(f"{done} of {len(details['runs'])} runs are finished already", self.console)
        self._print(line)
        self._tasks[""] = self._bars.add_task("all runs", total=self.total)

    def _ended(self, name: str, event: str, details: Mapping[str, Any]) -> None:
        self._bars.remove_task(self._tasks.pop(name))
        self.ended += 1
        self._bars.update(self._tasks[""], completed=self.ended)
        why = f": {details['message']}" if details["message"] else ""
        self._print(f"{event} {name} after {duration(details['seconds'])} ({self.ended}/{self.total}){why}")

    def _print(self, line: str) -> None:
        if not self.quiet:
            self.console.print(text(line), soft_wrap=True)
