"""``plugins list`` and ``plugins show``."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcore import registry
from fedcore.cli import names, options, output
from fedcore.cli.guard import guarded

app = typer.Typer(help="The methods and trackers that are installed.", no_args_is_help=True)


@app.command("list")
@guarded
def list_(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the installed plugins and trackers."""
    rows = [
        {
            "name": name,
            "group": names.group(name, point),
            "package": point.dist.name if point.dist else None,
            "version": point.dist.version if point.dist else None,
            "summary": names.summary(name, point),
        }
        for kind in ("plugin", "tracker")
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
    for title in (*names.GROUPS, names.THIRD_PARTY, names.TRACKERS):
        members = [row for row in rows if row["group"] == title]
        if members:
            table.add_section()
            heading = f"{title} (--tracker NAME)" if title == names.TRACKERS else title
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
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin or tracker, or module:package.module.Class.")],
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a plugin does, its options, its hooks and what it cannot be combined with."""
    from fedcore.cli.plugin_card import describe, describe_tracker, draw

    tracker = name in registry.available("tracker") and name not in registry.available("plugin")
    card = describe_tracker(name) if tracker else describe(name)
    if as_json:
        output.print_json(card)
    else:
        output.stdout().print(draw(card))
