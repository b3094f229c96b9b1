"""``data list`` and ``data split``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fedcore import ConfigError, FedcoreError, RunConfig
from fedcore.cli import group
from fedcore.tools import PARTITION_OPTIONS, options, output, preset_options, registry

app = group("Data sets, and their partitions among clients.")

HEADINGS = {"dataset": "data sets (--dataset)", "partitioner": "partitions (--partition)", "model": "models (--model)"}
"""Kinds of names that ``data list`` shows -> the line above them."""

SPLIT_FIELDS = (*PARTITION_OPTIONS, "data_dir", "seed")


@app.command("list")
def list_(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the data sets, the partitions, the models and the presets."""
    names = {kind: {name: _first_line(kind, name) for name in registry.available(kind)} for kind in HEADINGS}
    names["preset"] = {name: _setting(name) for name in registry.available("preset")}
    for kind in HEADINGS:
        for prefix in registry.available(f"{kind} prefix"):
            names[kind][f"{prefix}:NAME"] = _first_line(f"{kind} prefix", prefix)
    if as_json:
        output.print_json(names)
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("description")
    for kind, title in {**HEADINGS, "preset": "known settings (--preset)"}.items():
        table.add_section()
        table.add_row(output.text(title, style="bold cyan"))
        for name, line in names[kind].items():
            table.add_row(output.text(f"  {name}"), output.text(line))
    output.stdout().print(table)


@app.command("split")
@options.config_flags(only=SPLIT_FIELDS)
def split(
    flags: dict[str, Any],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.json", help="Also write the partition to a file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    debug: options.Debug = False,
) -> None:
    """Split a data set among clients and print the partition as a table.

    --out writes it to a file, for train --partition FILE.json.
    """
    config = RunConfig.create(flags)
    if config.partition.endswith(".json"):
        raise ConfigError(f"--partition {config.partition}: split writes partition files; name a partitioner instead")
    if out is not None:
        check_out(out, [".json"], force=force)

    from fedcore.data import load_dataset, make_partition
    from fedcore_console.partition_table import draw_table

    dataset = load_dataset(config.dataset, config.data_dir, config.task)
    partition = make_partition(dataset, config)
    if out is not None:
        partition.save(out)
    console = output.stdout()
    console.print(draw_table(partition, dataset.strata[0], len(dataset.strata[1]), console.width))
    output.line(f"sha256 {partition.sha256}", style="dim")
    for message in (*dataset.notes, *cast(list[str], partition.info.get("notes", []))):
        output.note(message)
    if out is not None:
        output.line(f"written: {out} (use it with --partition {out})")


def check_out(out: Path, suffixes: Sequence[str], *, force: bool) -> None:
    """Refuse a file to write if the suffix is another one, or if the file exists without ``force``."""
    if out.suffix not in suffixes:
        raise ConfigError(f"--out {out}: the name must end with {' or '.join(suffixes)}")
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists already; choose another name, or replace it with --force")


def _first_line(kind: str, name: str) -> str:
    """Return the documentation of what a name stands for, in one line."""
    try:
        line = output.prose(registry.resolve(kind, name)).partition("\n")[0].removeprefix("Return ")
        return line[:1].upper() + line[1:]
    except FedcoreError as error:  # a broken package does not hide the others
        return f"broken: {error}"


def _setting(preset: str) -> str:
    """Return the setting of a preset in one line."""
    try:
        values = preset_options(preset)
    except FedcoreError as error:
        return f"broken: {error}"
    config = RunConfig.create(values)
    unit, work = config.local_work
    alpha = f", alpha {config.alpha}" if "alpha" in values else ""
    return (
        f"{config.dataset}, {config.model}, {config.partition}{alpha}, {config.cohort_size} of {config.clients} "
        f"clients, {config.rounds} rounds, {work} local {unit if work > 1 else unit[:-1]}"
    )
