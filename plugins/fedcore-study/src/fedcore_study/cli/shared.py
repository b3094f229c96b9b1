"""Options that several commands of this package have."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcore import ConfigError
from fedcore.tools import options, output

if TYPE_CHECKING:
    from fedcore_study.tables import Table

SWEEP_PANEL = "Sweep"
"""A panel of the help."""

TABLE_FORMATS = ("table", "markdown", "csv", "latex", "json")
"""How a table can be printed."""

_MOST = 10_000
"""Characters in a line of a pipe."""

Runs = Annotated[list[Path], typer.Argument(metavar="RUN_OR_SWEEP...", help="Run or sweep directories.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="Option that distinguishes rows: plugin, name (of runs), or an option of train; can be repeated. Default "
        "plugin.",
    ),
]
Tuned = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION,...",
        help="Options that each row has its own value of: lr, mu, moon.mu. Of several values the best on held-out "
        "parts counts. Default those that a search tried.",
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="ROW=NAME", help="Another name for a row; can be repeated."),
]
Baseline = Annotated[
    str | None, typer.Option(metavar="ROW", help="Row that differences are to; default that of fedavg, if just one is.")
]
Reported = Annotated[
    list[str] | None,
    typer.Option("--reported", metavar="PLUGIN.NAME", help="Show a figure of a plugin's report: attack.success."),
]
Parallel = Annotated[
    int | None,
    options.option(
        "--parallel",
        "Parallel runs, each in its own process; default one per core if memory allows.",
        SWEEP_PANEL,
        min=1,
    ),
]


def print_table(table: Table) -> None:
    """Print a table: in parts below each other where a terminal is too narrow, in a pipe as wide as it is."""
    from rich.measure import Measurement

    console = output.stdout()
    endless = not (console.is_terminal or "COLUMNS" in os.environ)
    for part in table.drawn(sys.maxsize if endless else console.width):
        if endless:
            options = console.options.update(max_width=_MOST)
            console.width = max(console.width, Measurement.get(console, options, part).maximum)
        console.print(part)


def labels_of(texts: list[str] | None) -> dict[str, str]:
    """Return the names that ``--label`` gives to rows.

    :raises ConfigError: a text has another form.
    """
    labels = {}
    for text in texts or ():
        row, equals, name = text.rpartition("=")  # a row's own name can have one: "fedavg, lr=0.1"
        if not (equals and row and name.strip()):
            raise ConfigError(f"--label {text!r}: write ROW=NAME, for example fedavg=FedAvg")
        labels[row] = name.strip()
    return labels
