"""Progress of a run on a terminal, redrawn in place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedcore.tools import PROTOCOLS, Display, output, rounds
from fedcore_console.words import completed, doing, stopwatch

ROWS = 8


def show(console: Console) -> LiveDisplay | None:
    """Return the display of a terminal; None for files and pipes, also with colours."""
    return LiveDisplay(console) if console.is_interactive and console.file.isatty() else None


class LiveDisplay(Display):
    """A line of progress and the last rounds, redrawn in place. Notes and failures stay above them."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._records: deque[Mapping[str, Any]] = deque(maxlen=ROWS)
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=5, vertical_overflow="crop")

    def __exit__(self, *_: object) -> None:
        """Stop drawing. The last picture stays."""
        self._live.stop()

    def started(self, details: Mapping[str, Any]) -> None:
        """Print the run's headline and start drawing."""
        self.console.print(output.text(self.headline, style="bold"), soft_wrap=True)
        super().started(details)
        self._live.start(refresh=True)

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Add the round to the table, and print its failures above."""
        self._records.append(record)
        for line in rounds.failures(record):
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
        bar = ProgressBar(total=max(1, self.rounds), completed=completed(self), width=width)
        times = f"{stopwatch(self.clock() - self.began)} elapsed"
        if self.left is not None and self.done < self.rounds:
            times += f", {stopwatch(self.left)} left"
        activity = Text(doing(self), style="cyan")
        line.add_row(bar, f"{self.done}/{self.rounds} rounds", activity, Text(times, style="dim"))
        return line


def rounds_table(records: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return the rounds as a table of at most ``width`` characters. The last losses are omitted if they do not fit."""
    figures = [rounds.percentages(record) for record in records]
    protocols = [name for name in PROTOCOLS if any(name in of_round for of_round in figures)]
    unit = " %" if any(text.endswith(" %") for of_round in figures for text in of_round.values()) else ""
    losses = list(dict.fromkeys(name for record in records for name, _ in rounds.losses(record)))
    failing = any(map(rounds.lost, records))
    room = width - sum(len(name) + 4 for name in protocols) - 20 - (8 if failing else 0)
    shown: list[str] = []
    for name in losses:
        room -= max(7, len(output.clean(name))) + 2
        if room < 0:
            break
        shown.append(name)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("round", justify="right")
    for name in protocols:
        table.add_column(f"{name}{unit}", justify="right", style="bold", no_wrap=True)
    for name in shown:
        table.add_column(output.text(name), justify="right", no_wrap=True)
    if failing:
        table.add_column("failed", justify="right", style="yellow", no_wrap=True)
    table.add_column("s/round", justify="right", style="dim", no_wrap=True)
    for record, of_round in zip(records, figures, strict=True):
        row = [str(record["round"] + 1)]
        row += [of_round.get(name, "-").removesuffix(" %") for name in protocols]
        row += [output.number(record["losses"].get(name)) for name in shown]
        row += [str(rounds.lost(record).total() or "")] if failing else []
        table.add_row(*row, f"{rounds.seconds(record):.2f}")
    return table
