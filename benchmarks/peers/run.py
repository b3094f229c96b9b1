"""Time other federated-learning simulators on fedcore's workloads, beside its reference loop and fedcore itself.

    python benchmarks/peers/run.py --workload W1 --workload W2 --rounds 13 --blocks 3

Every side trains the same network from the same weights on the same samples, each in a process of its own, one after
the other. See README.md beside this file for what is equal and what is not.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import environments
import table
from exported import STARTED
from processes import watched
from table import REFERENCE, WARM_UP, Run

HERE = Path(__file__).resolve().parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_local_fs_capacity_threshold": "0.999",
    "PYTHONNOUSERSITE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""No usage statistics leave the machine, and nothing outside its own environment reaches a runner."""


@dataclass(frozen=True)
class Side:
    """What is timed.

    :param package: the distribution, whose environment has the side's name; None for fedcore's own.
    :param command: from the interpreter, the runner's arguments and the number of cores.
    """

    name: str
    package: str | None
    command: Callable[[str, list[str], int], list[str]]


def _script(name: str) -> Callable[[str, list[str], int], list[str]]:
    return lambda python, arguments, cores: [python, str(HERE / name), *arguments]


def _torchrun(python: str, arguments: list[str], cores: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cores)]
    return [python, *launcher, str(HERE / "run_pfl.py"), *arguments]


STACKED = Side("fedcore --stack auto", None, lambda *given: [*_script("run_fedcore.py")(*given), "--stack", "auto"])
OWN = (Side(REFERENCE, None, _script("run_reference.py")), Side("fedcore", None, _script("run_fedcore.py")), STACKED)
PEERS = {
    side.name: side
    for side in (
        Side("flower", "flwr", _script("run_flower.py")),
        Side("pfl", "pfl", _torchrun),
        Side("flgo", "flgo", _script("run_flgo.py")),
        Side("fedlab", "fedlab", _script("run_fedlab.py")),
        Side("fluke", "fluke-fl", _script("run_fluke.py")),
        Side("blazefl", "blazefl", _script("run_blazefl.py")),
    )
}
ROUNDS = {"W1": 1, "W2": 2, "tiny": 20, "pfl-cifar10": 2, "cross-device": 1, "blazefl-cifar10": 1}
"""Workload -> the timed rounds of a run by default. A block takes 15 to 18 minutes on two quiet cores, by estimate."""


@dataclass(frozen=True)
class Setting:
    """How sides are run.

    :param rounds: timed ones, after the warm-up.
    :param timeout: seconds that one run may take.
    """

    folder: Path
    rounds: int
    cores: int
    timeout: float


def run_side(side: Side, python: str, run: Run, setting: Setting) -> Run:
    """Run one side and return its result, or why there is none."""
    total = setting.rounds + WARM_UP
    place = setting.folder / f"{side.name.replace(' ', '')}-{run.block}"
    place.mkdir()
    # Hard links: the runner's own files end in its own folder, and the data are stored once.
    for file in setting.folder.iterdir():
        if file.is_file():
            os.link(file, place / file.name)
    output, log = place / "stdout.log", place / "stderr.log"
    arguments = [str(place), "--rounds", str(total), "--cores", str(setting.cores)]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, **QUIET, "FLWR_HOME": str(place / "flwr"), f"{STARTED}_FILE": str(place / "first_batch")}
    environment[STARTED] = repr(time.monotonic())
    ended = watched(
        side.command(python, arguments, setting.cores),
        log=log, output=output, environment=environment, timeout=setting.timeout,
    )  # fmt: skip
    if ended.timed_out:
        return replace(run, error=f"stopped after {setting.timeout:.0f} s", timed_out=True)
    if ended.code:
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
        print("\n".join(f"  {side.name}: {line}" for line in tail), file=sys.stderr)
        return replace(run, error=f"exit {ended.code}: {tail[-1].strip() if tail else 'no message'}")
    try:
        found = table.parse(output.read_text(errors="replace"), total)
    except table.NoResult as error:
        return replace(run, error=str(error))
    return replace(run, **found, total=ended.seconds, peak_mib=ended.peak_mib)


def run_block(workload: str, block: int, sides: Sequence[tuple[Side, str | Exception]], setting: Setting) -> list[Run]:
    """Run every side once, one after the other; one that fails does not stop the others."""
    runs = []
    for side, python in sides:
        run = Run(workload, side.name, block)
        failed = isinstance(python, Exception)
        run = replace(run, error=str(python)) if failed else run_side(side, str(python), run, setting)
        runs.append(run)
        result = f"failed: {run.error}" if run.error else f"{table.rows([run])[0].seconds.median:.2f} s per round"
        print(f"{workload} block {block} {side.name}: {result}", file=sys.stderr, flush=True)
    return runs


def in_time(sides: Sequence[tuple[Side, str | Exception]], runs: Sequence[Run]) -> list[tuple[Side, str | Exception]]:
    """Return the sides that were not stopped in these runs: another block would take as long for no figure."""
    stopped = {run.side for run in runs if run.timed_out}
    return [(side, python) for side, python in sides if side.name not in stopped]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits 2 on a mistake in it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", action="append", choices=[*ROUNDS], help="can be given again; default all")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="can be given again; default all")
    parser.add_argument("--rounds", type=_positive, help="timed rounds of a run, after one that warms up")
    parser.add_argument("--blocks", type=_positive, default=1, help="runs of each side, in turn")
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="where the environments are or will be made")
    parser.add_argument("--timeout", type=_positive, default=90, help="seconds that one run may take")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="holds Fashion-MNIST and CIFAR-10")
    parser.add_argument("--save", type=Path, help="a file for the JSON, written anew after each block")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns 1 if a side failed."""
    asked = parse_arguments(arguments)

    import export
    from blazefl_cifar10 import BLAZEFL_CIFAR10
    from cross_device import CROSS_DEVICE

    from fedcore.engines import cores
    from fedcore_bench.workloads import AGAINST_REFERENCE

    more = {workload.name: workload for workload in (CROSS_DEVICE, BLAZEFL_CIFAR10)}
    workloads = {**AGAINST_REFERENCE, **more}
    sides: list[tuple[Side, str | Exception]] = [(side, sys.executable) for side in OWN]
    for name in asked.peer or PEERS:
        try:
            sides.append((PEERS[name], str(environments.python_of(name, asked.envs.resolve()))))
        except environments.EnvironmentFailed as error:
            sides.append((PEERS[name], error))
    runs: list[Run] = []
    for workload in asked.workload or ROUNDS:
        # Not below a deep folder: Ray's sockets, and so its folder, must have short names.
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
            setting = Setting(Path(folder), asked.rounds or ROUNDS[workload], cores(), asked.timeout)
            export.export(workloads[workload], setting.folder, data_dir=asked.data_dir)
            own = [pair for pair in sides if workload == "tiny" or pair[0] is not STACKED]
            for block in range(1, asked.blocks + 1):
                runs += run_block(workload, block, own, setting)
                own = in_time(own, [run for run in runs if run.workload == workload])
                if asked.save:
                    asked.save.write_text(as_json(runs, cores()), encoding="utf-8")
    show(asked, runs, cores())
    return int(any(run.error for run in runs))


def as_json(runs: Sequence[Run], cores: int) -> str:
    """Return the table with all that it was made from."""
    versions = {"torch": version("torch")}
    for name, side in PEERS.items():
        pins = environments.pins(HERE / "requirements" / f"{name}.txt")
        versions[side.package or name] = pins[side.package or name]
    about = {"cores": cores, "machine": platform.processor() or platform.machine(), "versions": versions}
    return table.as_json(table.rows(runs), runs, {**about, "warm_up": WARM_UP})


def show(asked: argparse.Namespace, runs: list[Run], cores: int) -> None:
    """Print the table in the form that was asked for."""
    rows = table.rows(runs)
    for remark in table.strayed(rows):
        print(f"note: {remark}", file=sys.stderr)
    if asked.json:
        print(as_json(runs, cores))
    elif asked.markdown:
        print(table.markdown(rows))
    else:
        from rich.console import Console
        from rich.table import Table

        printed = Table(*table.HEADER)
        for row in rows:
            printed.add_row(*table.cells(row))
        console = Console()
        console.width = max(console.width, 130)  # a pipe has 80 columns, which would cut the figures
        console.print(printed)


if __name__ == "__main__":
    sys.exit(main())
