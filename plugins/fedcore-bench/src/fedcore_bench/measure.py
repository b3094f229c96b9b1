"""Time the engine and the reference alternately, and say the ratio with its spread."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcore import RunConfig
from fedcore.data import Dataset, Partition
from fedcore.models import Placement
from fedcore.tools import Experiment, started
from fedcore_bench.cpu import CpuReference
from fedcore_bench.cuda import CudaReference
from fedcore_bench.reference import Task
from fedcore_bench.workloads import W3, Workload

MANY = 1_000_000
"""A number of rounds that no benchmark reaches: the last round of a run does more than others."""


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several measurements."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise measurements."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Measured:
    """One row of the benchmark.

    :param seconds: per round of the measured side.
    :param beside: seconds per round of the other side.
    :param ratio: of the two, block by block.
    """

    name: str
    beside_name: str
    seconds: Spread
    beside: Spread
    ratio: Spread
    ratio_is: str
    blocks: int
    rounds: int


class EngineRounds:
    """A run that goes on as long as it is timed."""

    def __init__(self, experiment: Experiment, state: Any, engine_start: float) -> None:
        self.experiment, self.state, self.start_seconds = experiment, state, engine_start

    def rounds(self, count: int) -> float:
        """Run whole rounds, evaluation, records and checkpoint included; returns seconds."""
        began = time.perf_counter()
        for _ in range(count):
            self.state = self.experiment.one_round(self.state)
        return time.perf_counter() - began


@contextmanager
def engine(config: RunConfig) -> Iterator[EngineRounds]:
    """Start a run of a workload in a temporary run directory."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fedcore-bench-") as folder:
        config = config.model_copy(update={"out": Path(folder) / "run", "rounds": MANY})
        with started(config) as (experiment, state):
            yield EngineRounds(experiment, state, time.perf_counter() - began)


def configured(workload: Workload, options: Mapping[str, Any], method: str = "fedavg") -> RunConfig:
    """Return a workload's configuration with the user's device, precision and workers, and a method."""
    plugins: dict[str, Any] = {} if method == "fedavg" else {method: {}}
    return RunConfig.create({**workload.config, **options, "plugins": plugins})


def against_reference(
    workload: Workload, options: Mapping[str, Any], *, blocks: int, block: int | None = None
) -> Measured:
    """Time a workload's rounds on the engine and on the reference loop, in turn."""
    size = block or workload.block
    with engine(configured(workload, options)) as ours:
        federation = ours.experiment.federation
        # On a CPU the reference always computes in float32.
        config = federation.config
        if federation.config.device == "cpu":
            config = config.model_copy(update={"precision": "float32"})
        reference = reference_for(config, federation.dataset, federation.partition)
        try:
            seconds = in_turn([lambda: ours.rounds(size), lambda: reference.rounds(size)], blocks)
        finally:
            reference.close()
    return _measured(workload.name, "reference", seconds, size, lambda engine, loop: loop / engine, "throughput")


def beside_fedavg(plugin: str, options: Mapping[str, Any], *, blocks: int, block: int | None = None) -> Measured:
    """Time a method's rounds of W3 and FedAvg's, in turn.

    :raises UnknownNameError: the method is not installed.
    """
    size = block or W3.block
    with engine(configured(W3, options, plugin)) as method, engine(configured(W3, options)) as fedavg:
        seconds = in_turn([lambda: method.rounds(size), lambda: fedavg.rounds(size)], blocks)
    return _measured(f"W3 {plugin}", "fedavg", seconds, size, lambda method, fedavg: method / fedavg, "time")


def reference_for(config: RunConfig, dataset: Dataset, partition: Partition) -> CpuReference | CudaReference:
    """Return the reference loop of a device."""
    if torch.device(config.device).type == "cuda":
        task = Task.of(config, Placement.plain().dataset(dataset), partition)  # it moves the data itself
        return CudaReference(task, torch.device(config.device))
    return CpuReference(Task.of(config, dataset, partition), config.workers)


def in_turn(sides: Sequence[Callable[[], float]], blocks: int) -> list[list[float]]:
    """Return the seconds of each side's blocks. The first block of each side does not count.

    The order of the sides is reversed every other time, so that a slow drift of the machine cancels.
    """
    for side in sides:
        side()
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(blocks):
        numbered = list(enumerate(sides))
        for index, side in reversed(numbered) if number % 2 else numbered:
            seconds[index].append(side())
    return seconds


def children() -> list[int]:
    """Return the descendants of this process; empty on a system without /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = re.search(r"^PPid:\s+(\d+)", status.read_text(), re.MULTILINE)
        except OSError:  # it has ended
            continue
        if parent:
            parents[int(status.parent.name)] = int(parent[1])
    processes = [os.getpid()]
    for process in processes:  # it grows meanwhile: workers are forked by a process between
        processes += [child for child, parent in parents.items() if parent == process]
    return processes[1:]


def _measured(
    name: str,
    beside: str,
    seconds: list[list[float]],
    block: int,
    ratio: Callable[[float, float], float],
    ratio_is: str,
) -> Measured:
    own, other = seconds
    return Measured(
        name,
        beside,
        Spread.of([taken / block for taken in own]),
        Spread.of([taken / block for taken in other]),
        Spread.of(list(map(ratio, own, other))),
        ratio_is,
        len(own),
        block,
    )
