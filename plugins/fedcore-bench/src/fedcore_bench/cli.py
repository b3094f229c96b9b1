"""``bench``: the engine's speed as ratios to a reference loop."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcore import ConfigError, FedcoreError, UnknownNameError
from fedcore.cli import command
from fedcore.tools import options, output, process

if TYPE_CHECKING:
    from rich.table import Table

    from fedcore_bench.measure import Measured, Spread
    from fedcore_bench.profile import Profile
    from fedcore_bench.scale import Scaled

WORKLOADS = ("W1", "W2", "W3", "tiny", "pfl-cifar10", "scale", "all")


def bench(
    workload: Annotated[
        list[str] | None, typer.Option("--workload", help=f"What to time: {', '.join(WORKLOADS)}; can be given again.")
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin", help="Methods of W3 and scale; default eight that are installed, and fedavg and moon."
        ),
    ] = None,
    clients: Annotated[
        list[int] | None,
        typer.Option("--clients", min=1, help="Numbers of registered clients of scale, the first is compared with."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of rounds of each side, timed in turn.")] = 3,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in a block; default the workload's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    workers: Annotated[int | None, typer.Option(min=0, help="As for train.")] = None,
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16; on a CPU the reference stays float32.")] = (
        "float32"
    ),
    capture: Annotated[bool, typer.Option(help="On CUDA, capture training steps as graphs.")] = True,
    lanes: Annotated[int, typer.Option(min=1, help="On CUDA, clients side by side in one process, as for train.")] = 1,
    stack: Annotated[int, typer.Option(min=1, help="Clients that train as one computation, as for train.")] = 1,
    by_part: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Instead, list the processor time per client by part, on a CPU; default tiny.",
        ),
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time whole rounds of the engine and of a plain PyTorch loop in turn, and print the ratio with its spread.

    W1, W2, tiny, pfl-cifar10: throughput relative to the loop (1.0 is its speed). W3: a method's time relative to
    FedAvg's. scale: time and peak memory of one cohort of 50 among ever more registered clients, relative to the
    fewest.
    """
    wanted = list(workload or (["tiny"] if by_part else ["W1", "W2"]))
    for name in wanted:
        if name not in WORKLOADS:
            raise UnknownNameError("workload", name, WORKLOADS)
    if "all" in wanted:
        wanted = [name for name in WORKLOADS if name != "all"]

    with process.importing():  # as train does: collections would visit torch's modules in the timed rounds
        from fedcore_bench import measure, scale, workloads

    if by_part:
        if unfit := [name for name in workload or () if name not in (*workloads.AGAINST_REFERENCE, "all")]:
            known = ", ".join(workloads.AGAINST_REFERENCE)
            raise ConfigError(f"--profile has no parts of workload {unfit[0]}; it lists those of: {known}")
        _profile([name for name in wanted if name in workloads.AGAINST_REFERENCE], blocks, rounds, as_json)
        return
    settings: dict[str, Any] = {
        "device": device,
        "workers": workers,
        "precision": precision,
    }
    added = {"capture": (capture, True), "lanes": (lanes, 1), "stack": (stack, 1)}  # of the package fedcore-accelerate
    settings |= {name: value for name, (value, default) in added.items() if value != default}
    measured: list[Measured] = []
    scaled: list[Scaled] = []
    for name in wanted:
        if name in workloads.AGAINST_REFERENCE:
            against = workloads.AGAINST_REFERENCE[name]
            measured.append(measure.against_reference(against, settings, blocks=blocks, block=rounds))
            _show(measured[-1])
            continue
        usual = scale.METHODS if name == "scale" else workloads.METHODS
        for method in plugin or usual:
            try:
                if name == "scale":
                    counts = clients or scale.CLIENTS
                    scaled += scale.over_clients(method, settings, clients=counts, blocks=blocks, block=rounds)
                    output.note(f"scale {method}: time {scaled[-1].ratio.median:.2f} with {counts[-1]:,} clients")
                else:
                    measured.append(measure.beside_fedavg(method, settings, blocks=blocks, block=rounds))
                    _show(measured[-1])
            except FedcoreError as error:
                if plugin:
                    raise
                output.note(f"{name} {method}: left out, {error}")
    if as_json:
        output.print_json([*map(asdict, measured), *({"name": "scale", **asdict(row)} for row in scaled)])
        return
    if measured:
        output.stdout().print(_table(measured))
    if scaled:
        output.stdout().print(_scale_table(scaled))


def _show(row: Measured) -> None:
    output.note(f"{row.name}: {row.ratio_is} {row.ratio.median:.2f} of {row.beside_name}'s")


def _table(rows: list[Measured]) -> Table:
    from rich.table import Table

    table = Table("workload", "s per round", "beside", "s per round", "ratio", "of", "blocks x rounds")
    for row in rows:
        table.add_row(
            row.name,
            _text(row.seconds),
            row.beside_name,
            _text(row.beside),
            _text(row.ratio),
            row.ratio_is,
            f"{row.blocks} x {row.rounds}",
        )
    return table


def _scale_table(rows: list[Scaled]) -> Table:
    from rich.table import Table

    table = Table("scale", "clients", "s per round", "ratio", "start s", "parent MiB", "ratio", "worker MiB", "ratio")
    for row in rows:
        ratio = row.memory_ratio
        table.add_row(
            row.method,
            f"{row.clients:,}",
            _text(row.seconds),
            _text(row.ratio),
            f"{row.start_seconds:.1f}",
            f"{row.memory.parent:.0f}",
            f"{ratio.parent:.2f}",
            "" if row.memory.worker is None else f"{row.memory.worker:.0f}",
            "" if ratio.worker is None else f"{ratio.worker:.2f}",
        )
    return table


def _profile(names: list[str], blocks: int, rounds: int | None, as_json: bool) -> None:
    from fedcore_bench.profile import profile
    from fedcore_bench.workloads import AGAINST_REFERENCE

    profiles = [profile(AGAINST_REFERENCE[name], blocks=blocks, block=rounds) for name in names]
    if as_json:
        output.print_json(list(map(asdict, profiles)))
        return
    for each in profiles:
        output.stdout().print(_profile_table(each))


def _profile_table(row: Profile) -> Table:
    from rich.table import Table

    table = Table(
        f"{row.name}, {row.clients} clients a round", f"ms of processor per client, {row.blocks} x {row.rounds}"
    )
    for name, spread in (
        ("one process", row.total),
        ("with one worker process", row.with_worker),
        ("bare steps", row.steps),
        ("beyond the bare steps, one process", row.beyond),
        ("beyond them, with one worker process", row.beyond_with_worker),
    ):
        table.add_row(name, _text(spread))
    table.add_section()
    for part, milliseconds in row.parts.items():
        table.add_row(part, f"{milliseconds:.3f}")
    return table


def _text(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.least:.3g} to {spread.greatest:.3g})"


app = command(bench)
