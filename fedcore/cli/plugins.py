"""``plugins list`` and ``plugins show``."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcore.base import registry
from fedcore.cli import names, options, output
from fedcore.cli.guard import guarded

app = typer.Typer(help="The methods, trackers and engines that are installed.", no_args_is_help=True)


@app.command("list")
@guarded
def list_(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the installed plugins, trackers and engines."""
    rows = [
        {
            "name": name,
            "group": names.group(name, point),
            "package": point.dist.name if point.dist else None,
            "version": point.dist.version if point.dist else None,
            "summary": names.summary(name, point),
        }
        for kind in ("plugin", "tracker", "engine")
        for name, point in registry.available(kind).items()
    ]
    if as_json:
        output.print_json(rows)
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("plugin", style="bold", no_wrap=True)
    table.add_column("package")
    table.add_column("summary")
    flags = {names.TRACKERS: " (--tracker NAME)", names.ENGINES: " (--engine NAME)"}
    for title in (*names.GROUPS, names.THIRD_PARTY, *flags):
        members = [row for row in rows if row["group"] == title]
        if members:
            table.add_section()
            heading = title + flags.get(title, "")
            table.add_row(output.text(heading, style="bold cyan"))
        for row in members:
            package = f"{row['package'] or '-'} {row['version'] or ''}"
            table.add_row(*map(output.text, (f"  {row['name']}", package, row["summary"])))
    console = output.stdout()
    console.print(table)
    console.print("More about one: fedcore plugins show NAME", style="dim")


@app.command("show")
@guarded
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, tracker or engine, or module:package.Class.")],
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a plugin does, its options, its hooks and what it cannot be combined with."""
    from fedcore.cli.plugin_card import describe, describe_part, draw

    others = [kind for kind in ("tracker", "engine") if name in registry.available(kind)]
    card = describe_part(others[0], name) if others and name not in registry.available("plugin") else describe(name)
    if as_json:
        output.print_json(card)
    else:
        output.stdout().print(draw(card))
