"""``reproduce``: a paper's table or figure, run again and printed next to the paper's numbers."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import INTERRUPTED, SOME_FAILED, options, output
from fedcore_study.tools import SWEEP_PANEL, TABLE_FORMATS, Parallel, counted, print_table

if TYPE_CHECKING:
    from fedcore_reproduce.recipe import Kind
    from fedcore_reproduce.run import Plan, Reproduction

TABLE = "Table"


@options.config_flags(only=("data_dir", "device"))
def reproduce(
    flags: dict[str, Any],
    *,
    method: Annotated[
        str | None, typer.Argument(metavar="[METHOD]", help="The method whose paper it is; none lists all recipes.")
    ] = None,
    table: Annotated[
        str | None,
        options.option("--table", "The paper's table; none lists the method's recipes.", TABLE, metavar="N"),
    ] = None,
    figure: Annotated[
        str | None,
        options.option("--figure", "The paper's figure, in place of a table.", TABLE, metavar="N"),
    ] = None,
    scale: Annotated[
        str,
        options.option(
            "--scale",
            "paper: as in the paper. quick: scaled down to minutes on two cores, and says how far.",
            TABLE,
            metavar="quick|paper",
        ),
    ] = "quick",
    rows: Annotated[
        list[str] | None,
        options.option("--row", "Only this row, named as printed; can be given again.", TABLE, metavar="NAME"),
    ] = None,
    columns: Annotated[
        list[str] | None,
        options.option("--column", "Only this column, named as printed; can be given again.", TABLE, metavar="NAME"),
    ] = None,
    form: Annotated[
        str, options.option("--format", "How to print it.", TABLE, metavar="|".join(TABLE_FORMATS))
    ] = "table",
    seeds: Annotated[
        int | None,
        options.option("--seeds", "How many (0 to N-1), in place of the recipe's.", SWEEP_PANEL, min=1),
    ] = None,
    out: Annotated[
        Path | None,
        options.option(
            "--out", "The sweep's folder; default reproduce/<method>-table-<N>-<scale>, or figure.", SWEEP_PANEL
        ),
    ] = None,
    evidence: Annotated[
        Path | None,
        options.option(
            "--evidence",
            "Write each run's evidence there, as fedcore results add does, those in progress too.",
            SWEEP_PANEL,
            metavar="DIR",
        ),
    ] = None,
    parallel: Parallel = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, and say which runs there would be; start none.")
    ] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Run a table or figure of a method's paper again, and print the paper's numbers, ours and the difference.

    The runs are a sweep: after Ctrl-C, or with other rows, columns or seeds, the command goes on in the same folder.
    What cannot be run here is shown with the reason. Exit code 3: some runs failed.
    """
    from fedcore_reproduce.find import find_recipe
    from fedcore_reproduce.recipe import SCALES

    if scale not in SCALES:
        raise UnknownNameError("scale", scale, SCALES)
    if form not in TABLE_FORMATS:
        raise UnknownNameError("format", form, TABLE_FORMATS)
    if table is not None and figure is not None:
        raise ConfigError("--table and --figure: a recipe is of one of them")
    number = table if figure is None else figure
    if number is None:
        for flag, names in (("--row", rows), ("--column", columns)):
            if names:
                raise ConfigError(f"{flag} {names[0]}: of which table? Add --table N")
        _list(method)
        return
    kind: Kind = "table" if figure is None else "figure"
    if method is None:
        flag = f"--{kind} {number}"
        raise ConfigError(f"{flag}: of which method? Write fedcore reproduce METHOD {flag}")
    recipe = find_recipe(output.note, method, number, kind)

    from fedcore_reproduce import run

    planned = run.plan(
        recipe,
        scale,
        changes=flags,
        seeds=seeds,
        rows=rows or (),
        columns=columns or (),
        note=output.note,
    )
    if dry_run:
        _show_plan(planned)
        return

    from fedcore_study.tools import SweepDisplay

    folder = out or Path("reproduce") / recipe.folder(scale)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is preempted stops as at Ctrl-C
    if scale == "quick" and not quiet:
        _estimate(planned, folder, parallel)
    with SweepDisplay(output.stderr(), quiet=quiet) as display:
        reproduction, result = run.run(planned, folder, parallel=parallel, listen=display)
    if evidence is not None and result is not None:
        _keep(planned, folder, evidence)
    if result is not None and result.interrupted:
        output.error(
            f"{len(result.named('finished'))} of {len(result.outcomes)} runs are finished. Go on with the same command",
            label="stopped",
        )
        raise typer.Exit(INTERRUPTED)
    _print(reproduction, form)
    failed = result.named("failed") if result else []
    for outcome in failed:
        output.error(f"{outcome.name}: {outcome.message}", label="failed")
    if failed:
        raise typer.Exit(SOME_FAILED)
    if result and form == "table" and not quiet:
        output.note(
            f"the runs are in {reproduction.directory}: fedcore compare {shlex.quote(str(reproduction.directory))}"
        )


def _estimate(planned: Plan, folder: Path, parallel: int | None) -> None:
    """Say how long the runs will take, from one timed round."""
    from fedcore_reproduce.estimate import estimate

    console = output.stderr()
    with console.status("timing one round", spinner="line"):
        duration = estimate(planned, folder, parallel)
    if duration is not None:
        output.note(duration, console)


def _keep(planned: Plan, folder: Path, evidence: Path) -> None:
    """Write the evidence of a table's runs."""
    from fedcore_reproduce.collect import collect
    from fedcore_reproduce.places import cells

    asked = {(planned.scale, cell.row, cell.column) for cell in planned.cells}
    configured = cells([planned.recipe])
    among = {place: configured[place] for place in configured if (place.scale, place.row, place.column) in asked}
    collected = collect([folder], evidence, among, warn=output.note, only_tables=True)
    output.note(f"the evidence of {len(collected.written)} runs is in {evidence}")


def _list(method: str | None) -> None:
    from fedcore_reproduce.find import find_recipes

    recipes = find_recipes(output.note, method)
    console = output.stdout()
    if not recipes:
        console.print("No installed package has recipes.")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("method", "recipe", "cells", "quick runs", "title"):
        table.add_column(heading, justify="right" if heading in ("cells", "quick runs") else "left")
    for recipe in recipes:
        cells = list(recipe.cells("quick"))
        runs = sum(cell.choice is not None for cell in cells)
        row = (recipe.method, recipe.label, len(cells), runs, recipe.title)
        table.add_row(*map(output.text, row))
    console.print(table)
    console.print(f"Run one: {recipes[0].command}", style="dim")


def _show_plan(planned: Plan) -> None:
    """Print how many runs the cells have, or why they have none. Columns with the same rows and state share a line."""
    rows: dict[tuple[str, str], list[str]] = {}  # by column and state
    for cell in planned.cells:
        number = len(planned.runs.get((cell.row, cell.column), []))
        state = f"not run: {cell.reason}" if cell.reason else f"{counted(number, 'run')} each"
        rows.setdefault((cell.column, state), []).append(cell.row)
    columns: dict[tuple[str, str], list[str]] = {}  # by rows and state
    for (column, state), names in rows.items():
        columns.setdefault((", ".join(names), state), []).append(column)
    for (named, state), where in columns.items():
        output.line(f"{'; '.join(where)}: {named}: {state}")
    runs = {identity for identities in planned.runs.values() for identity in identities}
    output.note(f"{len(runs)} runs, none started")


def _print(reproduction: Reproduction, form: str) -> None:
    from fedcore_reproduce import formats

    if form != "table":
        typer.echo(formats.FORMATS[form](reproduction), nl=False)
        return
    output.line(formats.title(reproduction), style="bold")
    for block in formats.blocks(reproduction):
        print_table(block)
    for line in formats.caption(reproduction):
        output.line(line, style="dim")
