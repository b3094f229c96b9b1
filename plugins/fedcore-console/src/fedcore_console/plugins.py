"""``plugins list``: the methods, trackers and engines that are installed."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from fedcore.cli import command
from fedcore.tools import options, output, registry

HEADING = "fedcore:"
"""The prefix of a package's keyword that names the heading under which its methods are listed."""
OTHERS = "other methods"
HEADINGS = {"tracker": "trackers", "engine": "engines"}
FLAGS = {"trackers": " (--tracker NAME)", "engines": " (--engine NAME)"}
SUMMARIES = {
    "fedavg": "FedAvg (AISTATS 2017): the mean of the clients' models by samples; the base of all methods",
    "local": "Worker processes on this machine, one thread each, or this process, or one CUDA device",
}
"""Descriptions of fedcore's own entry points. A package's summary describes its entry points."""


def list_(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the installed plugins, trackers and engines."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "group": HEADINGS.get(kind) or _heading(point),
            "package": point.dist.name if point.dist else None,
            "version": point.dist.version if point.dist else None,
            "summary": registry.conflict(kind, name) or _summary(point),
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
    for title in sorted({row["group"] for row in rows}, key=_position):
        table.add_section()
        table.add_row(output.text(title + FLAGS.get(title, ""), style="bold cyan"))
        for row in [row for row in rows if row["group"] == title]:
            package = f"{row['package'] or '-'} {row['version'] or ''}"
            table.add_row(*map(output.text, (f"  {row['name']}", package, row["summary"])))
    console = output.stdout()
    console.print(table)
    console.print("More about one: fedcore plugins show NAME", style="dim")


app = command(list_)


def _heading(point: EntryPoint) -> str:
    """Return the heading that a method's package declares among its keywords, by default ``OTHERS``."""
    keywords = ",".join(point.dist.metadata.get_all("Keywords") or []).split(",") if point.dist else []
    heading = next((word.strip() for word in keywords if word.strip().startswith(HEADING)), "")
    return heading.removeprefix(HEADING).strip() or OTHERS


def _summary(point: EntryPoint) -> str:
    """Return the one-line summary of the distribution behind an entry point; fedcore's own have one each.

    A summary such as ``FedRep (ICML 2021): heads; FedBABU (ICLR 2022): a body`` has a part for each name. Then return
    the part that begins with the entry point's name.
    """
    if point.value.startswith("fedcore.") and point.name in SUMMARIES:
        return SUMMARIES[point.name]
    # Not metadata["Summary"]: with the backport importlib_metadata imported, a missing key raises.
    whole = next(iter(point.dist.metadata.get_all("Summary") or []), "") if point.dist else ""
    parts = whole.split("; ")
    return next((part for part in parts if part.partition(" ")[0].strip(":").lower() == point.name), whole)


def _position(title: str) -> tuple[int, str]:
    """Return the sort key of a heading: headings of methods by name, then other methods, trackers, engines."""
    last = (OTHERS, *HEADINGS.values())
    return (last.index(title) + 1 if title in last else 0, title)
