"""The tables of ``runs``."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedcore.tools import PROTOCOLS, output, protocols
from fedcore_study.lenient import mapping_in

if TYPE_CHECKING:
    from fedcore_study.runs.deletion import Removal
    from fedcore_study.runs.overview import Overview

COLORS = {"finished": "", "stopped": "yellow", "running": "cyan", "broken": "red"}


def runs_table(runs: Sequence[Overview]) -> Table:
    """Return the table of ``runs list``. It fits into 80 columns: long names are folded."""
    figure = "acc %" if all(run.figure is None or run.accuracy is not None for run in runs) else "figure"
    headings = ("when", "run", "method", "data", "rounds", figure, "state")
    table = _table("", *headings, right=("rounds", figure), whole=("when", "rounds", figure, "state"))
    if any(run.labels.tags for run in runs):
        table.add_column("tags", overflow="fold", max_width=14)
    for run in runs:
        planned = "-" if run.planned is None else f"{run.done}/{run.planned}"
        accuracy = output.percent(run.accuracy) if figure == "acc %" else run.figure or "-"
        accuracy += "*" if run.protocol not in (None, "global") else ""
        cells = [when(run.begun), run.title, run.method or "-", run.dataset or "-", planned, accuracy]
        state = output.text(run.state, style=COLORS[run.state])
        table.add_row(*map(output.text, cells), state, output.text(" ".join(run.labels.tags)))
    others = {run.protocol for run in runs} - {None, "global"}
    if others:
        meant = "; ".join(PROTOCOLS[name].heading for name in PROTOCOLS if name in others)
        table.caption, table.caption_justify = output.text(f"* {meant}"), "left"
    return table


def details_tables(run: Mapping[str, Any]) -> Iterator[Table | Text]:
    """Yield what ``runs show`` prints."""
    about = [("state", run["state"]), ("folder", run["path"])]
    about += [("tags", ", ".join(run["tags"]))] if run["tags"] else []
    about += [("note", run["note"])] if run["note"] else []
    about += [("begun", _time(run["begun"])), ("rounds", f"{run['rounds']} of {run['planned']}")]
    if run["bytes"]:
        about.append(("traffic", f"{_size(run['bytes']['down'])} down, {_size(run['bytes']['up'])} up"))
    yield _rows(run["name"] or run["folder"], [*about, ("method", run["method"])])
    yield _rows("Setting", [(name, _value(value)) for name, value in run["setting"].items()])
    if run["figures"]:
        others = dict.fromkeys(name for row in run["figures"].values() for name in protocols.further(row))
        accuracy = ["accuracy"] if any("accuracy" in row for row in run["figures"].values()) else []
        table = _table("Figures", "protocol", "of what", *(f"{name} %" for name in accuracy), "loss", *others)
        for name, row in run["figures"].items():
            figures = [output.percent(row.get(each)) for each in accuracy]
            figures += [output.number(row.get(each)) for each in ("loss", *others)]
            table.add_row(*map(output.text, (name, PROTOCOLS[name].heading, *figures)))
        yield table
    if run["sessions"]:
        table = _table("Sessions", "began", "commit", "fedcore", "torch", "machine")
        for session in run["sessions"]:
            machine, versions = mapping_in(session, "machine"), mapping_in(session, "versions")
            computer = machine.get("gpu") or machine.get("cpu") or "-"
            begun_by = [_time(session.get("started")), session.get("commit") or "-"]
            libraries = [versions.get("fedcore", "-"), versions.get("torch", "-")]
            cells = [*begun_by, *libraries, f"{computer}, {machine.get('cores')} cores"]
            table.add_row(*(output.text(str(cell)) for cell in cells))
        yield table
    files = {**run["files"], "all": sum(run["files"].values())}
    yield _rows("Files", [(name, output.size(count)) for name, count in files.items()])
    if run["resume"]:
        label = "for more rounds" if run["state"] == "finished" else "go on with"
        yield Text.assemble((f"{label}: ", "bold"), output.clean(run["resume"]))
    elif run["state"] != "running":
        yield Text("It has no checkpoint from which it could go on, or its options were changed.")


def difference_tables(
    differences: Mapping[str, Any], titles: Sequence[str], folders: Sequence[str]
) -> Iterator[Table | Text]:
    """Yield what ``runs diff`` prints."""
    first, second = folders if titles[0] == titles[1] else titles
    if differences["options"]:
        yield _pairs("Options", first, second, differences["options"])
    else:
        yield Text("The runs have the same options, but for those that cannot change a result.")
    table = _table("Figures", "", first, second, "difference", right=(first, second, "difference"))
    for name, (one, other, change) in differences["figures"].items():
        table.add_row(*map(output.text, [name, _figure(name, one), _figure(name, other), _change(name, change)]))
    yield table
    if differences["without_effect"] or differences["versions"]:
        rest = {**differences["without_effect"], **differences["versions"]}
        yield _pairs("Without effect on results, and versions", first, second, rest)
    if not differences["same_data"]:
        yield Text("The content of the data differs, or is unknown.")
    elif not differences["same_partition"]:
        yield Text("The clients hold other samples: the partitions differ.")


def removals_table(removals: Sequence[Removal]) -> Table:
    """Return the table of the files that would be deleted."""
    figures = ("rounds", "size")
    table = _table("", "run", "state", "rounds", "deleted", "size", right=figures, whole=figures)
    for removal in removals:
        run = removal.run
        planned = "-" if run.planned is None else f"{run.done}/{run.planned}"
        table.add_row(*map(output.text, [run.folder, run.state, planned, removal.what, output.size(removal.bytes)]))
    return table


def when(begun: datetime.datetime | None) -> str:
    """Return a time in at most 8 characters: of today the time, of this year the day, else the month."""
    now = datetime.datetime.now().astimezone()
    try:
        local = begun.astimezone() if begun else None
    except OverflowError:  # not in the years 1 to 9999 here
        local = None
    if local is None:
        return "-"
    if local.date() == now.date():
        return local.strftime("%H:%M")
    return local.strftime("%d %b") if local.year == now.year else local.strftime("%b %Y")


def _time(text: Any) -> str:
    try:
        return datetime.datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
    except (TypeError, ValueError, OverflowError):
        return "-"


def _size(count: Any) -> str:
    return output.size(count) if isinstance(count, (int, float)) else "-"


def _value(value: Any) -> str:
    """Return an option's value as a config file has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "-"}[value]
    return str(value)


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith(("accuracy", "std", "worst10")):
        return f"{output.percent(value)} %"
    if name.startswith("bytes"):
        return output.size(value)
    if name == "seconds":
        return output.duration(value)
    return str(value) if isinstance(value, int) else output.number(value)


def _change(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith(("accuracy", "std", "worst10")):
        return f"{100 * value:+.2f}"
    sign = "-" if value < 0 else "+" if value else ""
    return sign + _figure(name, abs(value))


def _pairs(title: str, first: str, second: str, pairs: Mapping[str, Sequence[Any]]) -> Table:
    table = _table(title, "", first, second)
    for name, (one, other) in pairs.items():
        table.add_row(*map(output.text, [name, _value(one), _value(other)]))
    return table


def _rows(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify, table.title_style = output.text(title), "left", "bold not italic"
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(output.text(name), output.text(value))
    return table


def _table(title: str, *headings: str, right: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """Return an empty table.

    :param right: headings of columns that are set flush right.
    :param whole: headings of columns whose cells are not folded.
    """
    table = Table(
        title=output.text(title) if title else None,
        title_justify="left",
        title_style="bold not italic",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for heading in headings:
        side: Any = "right" if heading in right else "left"
        table.add_column(output.text(heading), justify=side, overflow="fold", no_wrap=heading in whole)
    return table
