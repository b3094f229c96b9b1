"""``data plot``: a partition as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fedcore import ConfigError, RunConfig
from fedcore.tools import code_in, files, options, output, safe_yaml, saved, typed_code
from fedcore_console import SPLIT_FIELDS, check_out
from fedcore_report.files import FORMATS, require_converter, save


@options.config_flags(only=SPLIT_FIELDS)
def plot(
    flags: dict[str, Any],
    *,
    file: Annotated[
        Path | None, typer.Argument(metavar="[RUN_OR_FILE]", help="A run, or a partition file of split or of a run.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", metavar="FILE.png", help="Also write the picture: .png, .pdf or .svg; can be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    allow_code: options.AllowCode = False,
    debug: options.Debug = False,
) -> None:
    """Draw a partition: a column per client, a row per class, block height by number of samples.

    Give a run or a partition file. A run's data set is found in its config.yaml. Or give the options of split to
    preview its result.
    """
    for picture in out or ():
        check_out(picture, [f".{form}" for form in FORMATS], force=force)
        require_converter(picture.suffix[1:])
    if file is not None and flags.get("partition") is not None:
        raise ConfigError(f"name either {file} or --partition {flags['partition']}")
    config = RunConfig.create(flags)
    source = file or (Path(config.partition) if config.partition.endswith(".json") else None)
    if source is not None:
        source = source / "partition.json" if source.is_dir() else source
        config = _with_data_of_run(source, config, flags, allow_code=allow_code)

    from fedcore.data import load_dataset, load_partition
    from fedcore.tools import resolve_partition
    from fedcore_report.cli.plot_picture import draw_picture

    dataset = load_dataset(config.dataset, config.data_dir, config.task)
    partition = load_partition(source, dataset) if source else resolve_partition(config, dataset)
    if partition.is_declared:
        raise ConfigError(
            f"{source}: there is nothing to draw; its clients hold their own data, and only their sizes are known"
        )
    groups, names = dataset.strata
    console = output.stdout()
    title = f"{dataset.name} by {partition.info['partitioner']}, {partition.num_clients} clients"
    output.line(title, style="bold")
    for line in draw_picture(partition, groups, names, console.width):
        console.print(line, soft_wrap=True)
    for message in cast(list[str], partition.info.get("notes", [])):
        output.note(message)
    for picture in out or ():
        from fedcore_report import samples

        with files.storing(picture):
            picture.parent.mkdir(parents=True, exist_ok=True)
            save(samples.picture(partition, dataset), picture)
        output.line(f"written: {picture}")


def _with_data_of_run(partition: Path, config: RunConfig, flags: dict[str, Any], *, allow_code: bool) -> RunConfig:
    """Return the configuration, without a flag for a data set with the data set of the partition's run."""
    beside = partition.with_name("config.yaml")
    if "dataset" in flags or partition.name != "partition.json" or not beside.is_file():
        return config
    written = safe_yaml.read_mapping(beside, plain=True)
    if "digests" not in written:  # some other file, not of a run
        return config
    config = RunConfig.create({"dataset": written.get("dataset"), "data_dir": written.get("data_dir"), **flags})
    saved.check_code(code_in(config), beside, allow=allow_code, own=typed_code(flags.values()))
    return config
