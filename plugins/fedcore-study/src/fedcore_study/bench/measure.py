"""Time the engine and the reference alternately, and say the ratio with its spread."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedcore import FedcoreError, RunConfig
from fedcore.base.registry import available, how_to_install
from fedcore.data import Dataset, Partition
from fedcore.models import Placement
from fedcore.runs.experiment import Experiment, started
from fedcore_study.bench.cpu import CpuReference
from fedcore_study.bench.cuda import CudaReference
from fedcore_study.bench.reference import Reference, Task
from fedcore_study.bench.workloads import W3, Workload

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

    :param seconds: per round, of what is measured; ``beside`` the same of what it is compared with.
    :param ratio: of each block that was timed right after its counterpart.
    """

    name: str
    beside_name: str
    seconds: Spread
    beside: Spread
    ratio: Spread
    ratio_is: str
    blocks: int
    rounds: int

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


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


def configured(workload: Workload, options: Mapping[str, Any]) -> RunConfig:
    """Return a workload's configuration with the user's device, precision and workers."""
    return RunConfig.create({**workload.config, **options})


def against_reference(
    workload: Workload, options: Mapping[str, Any], *, blocks: int, block: int | None = None
) -> Measured:
    """Time a workload's rounds on the engine and on the reference loop, in turn."""
    block = block or workload.block
    with engine(configured(workload, options)) as ours:
        federation = ours.experiment.federation
        # The reference lays the data out itself, and always computes in float32 on a CPU: that is the limit.
        config = federation.config
        if federation.config.device == "cpu":
            config = config.model_copy(update={"precision": "float32"})
        reference = reference_for(config, federation.dataset, federation.partition)
        try:
            pairs = list(alternate(ours.rounds, reference.rounds, blocks, block))
        finally:
            reference.close()
    return _measured(workload.name, "reference", pairs, block, lambda mine, its: its / mine, "throughput")


def beside_fedavg(plugin: str, options: Mapping[str, Any], *, blocks: int, block: int | None = None) -> Measured:
    """Time a method's rounds of W3 and FedAvg's, in turn.

    :raises FedcoreError: the method is not installed.
    """
    if plugin not in available("plugin"):
        raise FedcoreError(f"plugin {plugin!r} is not installed: {how_to_install(f'fedcore-{plugin}')}")
    block = block or W3.block
    with ExitStack() as stack:
        fedavg = stack.enter_context(engine(configured(W3, options)))
        method = stack.enter_context(engine(configured(W3, {**options, "plugins": {plugin: {}}})))
        pairs = list(alternate(method.rounds, fedavg.rounds, blocks, block))
    return _measured(f"W3 {plugin}", "fedavg", pairs, block, lambda mine, its: mine / its, "time")


def reference_for(config: RunConfig, dataset: Dataset, partition: Partition) -> Reference:
    """Return the reference loop of a device."""
    if torch.device(config.device).type == "cuda":
        task = Task.of(config, Placement.plain().dataset(dataset), partition)  # it moves the data itself
        return CudaReference(task, torch.device(config.device))
    return CpuReference(Task.of(config, dataset, partition), config.workers)


def alternate(
    ours: Callable[[int], float], other: Callable[[int], float], blocks: int, block: int
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of both for each block, after one block of each that does not count.

    Which of the two goes first changes from block to block, so that a slow drift of the machine cancels.
    """
    ours(block)
    other(block)
    for number in range(blocks):
        if number % 2:
            its = other(block)
            mine = ours(block)
        else:
            mine = ours(block)
            its = other(block)
        yield mine, its


def _measured(
    name: str,
    beside: str,
    pairs: list[tuple[float, float]],
    block: int,
    ratio: Callable[[float, float], float],
    ratio_is: str,
) -> Measured:
    return Measured(
        name,
        beside,
        Spread.of([mine / block for mine, _ in pairs]),
        Spread.of([its / block for _, its in pairs]),
        Spread.of([ratio(mine, its) for mine, its in pairs]),
        ratio_is,
        len(pairs),
        block,
    )
