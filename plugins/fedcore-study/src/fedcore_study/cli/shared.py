"""Options and tables that several commands of this package have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcore.tools import options, output

if TYPE_CHECKING:
    from rich.table import Table

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


def figures_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with names in the first column and numbers in the other columns. An empty title is left out."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=output.text(title) if title else None,
        title_justify="left",
        title_style="bold not italic",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for index, heading in enumerate(headings):
        table.add_column(output.text(heading), justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(output.text, row))
    return table
