"""``results``: evidence of runs, kept as small files, and the page that is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcore import ConfigError
from fedcore.tools import files, options, output
from fedcore_study.tools import Runs

app = typer.Typer(
    help="Evidence of runs, kept as small JSON files, and a page of tables from it.",
    no_args_is_help=True,
    add_completion=False,
)

RESULTS = Path("results")
PAGE = Path("docs/results.md")


@app.command("add")
def add(
    runs: Runs,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder of evidence.")] = RESULTS,
    debug: options.Debug = False,
) -> None:
    """Write the evidence of runs: configuration, partition hash, curves, final figures, commit, versions, machine.

    A run is filed under each table of a paper (fedcore reproduce) whose cell has its configuration, whatever command
    started it; one that belongs to no table under runs/. A run in progress is written as far as it came: add it again
    later. A run whose records contradict themselves is left out (exit code 2).
    """
    from fedcore_reproduce.collect import collect
    from fedcore_reproduce.find import find_recipes
    from fedcore_reproduce.places import cells

    collected = collect(runs, to, cells(find_recipes(output.note)), warn=output.note)
    for file in collected.written:
        output.line(f"written: {file}")
    if collected.refused:
        raise ConfigError(f"{len(collected.refused)} of the runs are left out, for the reasons above")
    if not collected.written and not collected.kept:
        raise ConfigError("there is no run with a finished round; nothing was written")


@app.command("page")
def page(
    file: Annotated[Path, typer.Argument(metavar="[PAGE.md]", help="The page with the markers.")] = PAGE,
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder of evidence.")] = RESULTS,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 if the page is not what the evidence gives.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Make the tables and pictures of a page from evidence, between lines <!-- results: TABLE --> and their end.

    TABLE is a folder's name, such as fedproc-table-2-paper.
    """
    from fedcore_reproduce import curves
    from fedcore_reproduce.evidence import read_all
    from fedcore_reproduce.find import find_recipes
    from fedcore_reproduce.page import END, filled, marker, pictures, unplaced
    from fedcore_reproduce.places import cells

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    evidence = read_all(source)
    recipes = find_recipes(output.note)
    new = filled(text, evidence, recipes, cells(recipes))
    for table in unplaced(text, evidence):
        output.note(f"{file} has no place for {table}: add the lines {marker(table)} and {END}")
    outdated = [file] if new != text else []
    drawn = pictures(evidence, recipes, file)
    outdated += [picture for picture, chart in drawn.items() if not curves.is_current(chart, picture)]
    if check:
        for path in outdated:
            output.error(f"{path} is not what {source} gives; run: fedcore results page {file} --from {source}")
        if outdated:
            raise typer.Exit(1)
        return
    files.write_text(file, new)
    for picture, chart in drawn.items():
        if picture in outdated:
            curves.draw(chart, picture)
    done = f"written: {', '.join(map(str, outdated))}" if outdated else f"{file} is what {source} gives already"
    output.line(done)
