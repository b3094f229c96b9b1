"""Options that several commands of this package have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcore.tools import options

SWEEP_PANEL = "Sweep"
"""A panel of the help."""

TABLE_FORMATS = ("table", "markdown", "csv", "latex", "json")
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
