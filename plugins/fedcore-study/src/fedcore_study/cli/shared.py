"""Options that several commands of this package have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

GRID = "Sweep"
"""A panel of the help."""

FORMATS = ("table", "markdown", "csv", "latex", "json")
"""How a table can be printed."""

Runs = Annotated[list[Path], typer.Argument(metavar="RUN_OR_SWEEP...", help="Run or sweep directories.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="Option that distinguishes rows: plugin, or an option of train; can be repeated. Default plugin.",
    ),
]
Baseline = Annotated[
    str | None, typer.Option(metavar="ROW", help="Row that differences are to; default fedavg where there is one.")
]
Reported = Annotated[
    list[str] | None,
    typer.Option("--reported", metavar="PLUGIN.NAME", help="Show a figure of a plugin's report: attack.success."),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        min=1,
        help="Parallel runs, each in its own process; default one per core if memory allows.",
        rich_help_panel=GRID,
    ),
]
