"""Progress of a run: live on a terminal, a line per round elsewhere, or nothing."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedcore.base.output import clean, duration, note, number, percent, stderr, stopwatch, text
from fedcore.base.protocols import EVALUATED
from fedcore.runs import records
from fedcore.runs.progress import NotebookDisplay, Progress, notebook_output, only_notes
from fedcore.runs.records import lost, seconds

ROWS = 8
MINUTE = 60.0

Record = Mapping[str, Any]


def make_display(console: Console, *, quiet: bool = False) -> Display:
    """Return the display for a console; commands use the console of stderr."""
    if quiet:
        return Display(console)
    return LiveDisplay(console) if console.is_interactive and console.file.isatty() else PlainDisplay(console)


def script_display() -> Progress:
    """Return the display of a run that a program starts: that of a notebook, of a terminal, or a line a minute."""
    if (draw := notebook_output()) is not None:
        return NotebookDisplay(draw)
    display = make_display(stderr())
    return MinuteDisplay(display.console) if isinstance(display, PlainDisplay) else display


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
        self._print(text(headline(details)))
        super().started(details)

    def round_done(self, record: Record) -> None:
        """Print one line for the round and one per kind of failure."""
        parts = [f"round {self.done}/{self.rounds}"]
        parts += [f"{name} {value} %" for name, value in accuracies(record).items()]
        parts += [f"{clean(name)} {number(value)}" for name, value in ordered(record["losses"])]
        if "system" in record:
            parts.append(took_part(record))
        elif failed := lost(record).total():
            parts.append(f"{failed} of {len(record['cohort'])} clients failed")
        parts.append(f"{duration(seconds(record))}/round")
        if self.left:
            parts.append(f"{duration(self.left)} left")
        self._print(Text("  ".join(parts)))
        for line in failures(record):
            self._print(Text(f"  {line}"))

    def _print(self, line: Text) -> None:
        self.console.print(line, soft_wrap=True)


class MinuteDisplay(PlainDisplay):
    """At most a line a minute, for scripts whose output goes to a file. Notes are warnings, as without a display."""

    def started(self, details: Mapping[str, Any]) -> None:
        """Remember the headline: a run of less than a minute prints nothing."""
        self._headline, self._printed = headline(details), self.clock()
        Display.started(self, details)

    def round_done(self, record: Record) -> None:
        """Print the round if the last line is a minute old."""
        if self.clock() - self._printed >= MINUTE:
            if self._headline:
                self._print(text(self._headline))
            self._headline, self._printed = "", self.clock()
            super().round_done(record)

    def noted(self, message: str) -> None:
        """Warn."""
        only_notes("note", {"message": message})


class LiveDisplay(Display):
    """A line of progress and the last rounds, redrawn in place. Notes and failures stay above them."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._records: deque[Record] = deque(maxlen=ROWS)
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=5, vertical_overflow="crop")

    def __exit__(self, *_: object) -> None:
        """Stop drawing. The last picture stays."""
        self._live.stop()

    def started(self, details: Mapping[str, Any]) -> None:
        """Print the run's headline and start drawing."""
        self.console.print(text(headline(details), style="bold"), soft_wrap=True)
        super().started(details)
        self._live.start(refresh=True)

    def round_done(self, record: Record) -> None:
        """Add the round to the table, and print its failures above."""
        self._records.append(record)
        for line in failures(record):
            self.console.print(Text.assemble((f"round {record['round'] + 1}: ", "yellow"), line), soft_wrap=True)

    def render(self) -> Group:
        """Return the current content."""
        parts: list[Any] = [self._progress()]
        if self._records:
            parts.insert(0, rounds_table(self._records, self.console.width))
        return Group(*parts)

    def _progress(self) -> Table:
        line = Table.grid(padding=(0, 2))
        for _ in range(4):
            line.add_column(no_wrap=True)
        width = max(8, min(30, self.console.width - 72))
        bar = ProgressBar(total=max(1, self.rounds), completed=self.completed, width=width)
        times = f"{stopwatch(self.clock() - self.began)} elapsed"
        if self.left is not None and self.done < self.rounds:
            times += f", {stopwatch(self.left)} left"
        line.add_row(bar, f"{self.done}/{self.rounds} rounds", Text(self.doing, style="cyan"), Text(times, style="dim"))
        return line


def rounds_table(records: Sequence[Record], width: int) -> Table:
    """Return the rounds as a table of at most ``width`` characters. The last losses are omitted if they do not fit."""
    protocols = [name for name in EVALUATED if any(name in accuracies(record) for record in records)]
    losses = list(dict.fromkeys(name for record in records for name, _ in ordered(record["losses"])))
    failing = any(map(lost, records))
    room = width - sum(len(name) + 4 for name in protocols) - 20 - (8 if failing else 0)
    shown: list[str] = []
    for name in losses:
        room -= max(7, len(clean(name))) + 2
        if room < 0:
            break
        shown.append(name)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("round", justify="right")
    for name in protocols:
        table.add_column(f"{name} %", justify="right", style="bold", no_wrap=True)
    for name in shown:
        table.add_column(text(name), justify="right", no_wrap=True)
    if failing:
        table.add_column("failed", justify="right", style="yellow", no_wrap=True)
    table.add_column("s/round", justify="right", style="dim", no_wrap=True)
    for record in records:
        row = [str(record["round"] + 1)]
        row += [accuracies(record).get(name, "-") for name in protocols]
        row += [number(record["losses"].get(name)) for name in shown]
        row += [str(lost(record).total() or "")] if failing else []
        table.add_row(*row, f"{seconds(record):.2f}")
    return table


def headline(details: Mapping[str, Any]) -> str:
    """Return a run in one line: methods, data, directory."""
    config = details["config"]
    methods = " + ".join(config.plugins) or "fedavg"
    began = f", from round {details['round'] + 1}" if details["round"] else ""
    counts = f"{config.clients} client{'s' * (config.clients > 1)}, {config.rounds} round{'s' * (config.rounds > 1)}"
    models = ", ".join(config.client_models) or config.model
    return f"{methods} on {config.dataset} ({models}), {config.partition}, {counts}{began}, in {details['directory']}"


def accuracies(record: Record) -> dict[str, str]:
    """Return the accuracies of a round in percent, by protocol; empty for a round without evaluation."""
    metrics = record["metrics"] or {}
    return {name: percent(metrics[name]["accuracy"]) for name in EVALUATED if metrics.get(name)}


def ordered(losses: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return losses by name, the task's loss first."""
    return sorted(losses.items(), key=lambda item: (item[0] != "task", item[0]))


def took_part(record: Record) -> str:
    """Return the participation and duration of a simulated round: ``5 of 8 clients, 35 s virtual``."""
    system = record["system"]
    words = records.in_words(len(record["cohort"]), record["accepted"], len(system["partial"]), lost(record))
    return f"{clean(words)}, {duration(system['seconds'])} virtual"


def failures(record: Record) -> Iterator[str]:
    """Yield a line per kind of failure, with the number of clients and the first message, without simulated ones."""
    kinds = Counter(failure["kind"] for failure in record["failures"] if failure["kind"] not in records.SIMULATED)
    for kind, count in kinds.items():
        first = next(failure for failure in record["failures"] if failure["kind"] == kind)
        others = f" and {count - 1} more" if count > 1 else ""
        yield clean(f"client {first['client']}{others} failed ({kind}): {first['message']}")
