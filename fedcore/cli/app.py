"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcore._version import __version__
from fedcore.cli import authors, bench, compare, data, plugins, report, reproduce, sweep, training

app = typer.Typer(
    help="Federated learning on non-IID data: one round loop, one local loop, every method a plugin.",
    epilog="First try: fedcore train --rounds 5",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedcore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


app.command("train")(training.train)
app.command("resume")(training.resume)
app.command("evaluate")(training.evaluate)
app.command("sweep")(sweep.sweep)
app.command("compare")(compare.compare)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.command("bench")(bench.bench)
plugins.app.command("new")(authors.new)
plugins.app.command("check")(authors.check)
app.add_typer(plugins.app, name="plugins")
app.add_typer(data.app, name="data")
