"""The workload ``scale``: does a round cost the same however many clients are registered?

A round has a cohort of 50 out of 10^3 to 10^6 clients with 10 samples each. The same 10,000 samples are dealt again and
again, so that nothing but the number of clients grows: with 10^6 clients, 1,000 of them share each sample.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore import FedcoreError, RunConfig
from fedcore_bench.measure import EngineRounds, Spread, children, configured, engine, in_turn
from fedcore_bench.workloads import Windows, Workload

CLIENTS = (1_000, 10_000, 100_000, 1_000_000)
METHODS = ("fedavg", "moon")
COHORT = 50
SAMPLES = 10
"""What each client holds."""


windows = Windows(SAMPLES)

SCALE = Workload(
    "scale",
    {"dataset": "module:fedcore_bench.workloads.small_mnist_shape", "model": "mlp",
     "partition": "module:fedcore_bench.scale.windows", "local_epochs": 2, "batch_size": 5, "lr": 0.01,
     "momentum": 0.9, "weight_decay": 0.0, "eval_every": 10},
    block=10,
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Peak resident memory in MiB (or a ratio of two): of the parent, and of the largest worker, None without one."""

    parent: float
    worker: float | None

    def ratio(self, other: Memory) -> Memory:
        """Return this memory relative to another."""
        return Memory(self.parent / other.parent, self.worker / other.worker if self.worker and other.worker else None)


@dataclass(frozen=True)
class Scaled:
    """One number of registered clients.

    :param seconds: per round.
    :param ratio: of the seconds to those with the fewest clients, block by block.
    :param start_seconds: from the configuration until the first task could start.
    :param memory: of a fresh process.
    :param memory_ratio: of the memory to that with the fewest clients.
    """

    method: str
    clients: int
    seconds: Spread
    ratio: Spread
    start_seconds: float
    memory: Memory
    memory_ratio: Memory
    blocks: int
    rounds: int


def scaled_config(method: str, clients: int, options: Mapping[str, Any]) -> RunConfig:
    """Return the workload with a method and a number of registered clients."""
    return configured(SCALE, {**options, "clients": clients, "participation": min(1.0, COHORT / clients)}, method)


def over_clients(
    method: str, options: Mapping[str, Any], *, clients: Sequence[int], blocks: int, block: int | None = None
) -> list[Scaled]:
    """Time a method's rounds with every number of clients in turn, then measure the memory of each on its own."""
    size = block or SCALE.block
    configs = [scaled_config(method, count, options) for count in clients]
    with ExitStack() as stack:
        engines = [stack.enter_context(engine(config)) for config in configs]
        sides = [lambda ours=ours: same_rounds(ours, size) for ours in engines]
        seconds = in_turn(sides, blocks)
    memory = [peak_memory(config, size) for config in configs]
    return [
        Scaled(
            method,
            count,
            Spread.of([own / size for own in seconds[index]]),
            Spread.of([own / first for own, first in zip(seconds[index], seconds[0], strict=True)]),
            engines[index].start_seconds,
            memory[index],
            memory[index].ratio(memory[0]),
            blocks,
            size,
        )
        for index, count in enumerate(clients)
    ]


def same_rounds(ours: EngineRounds, block: int) -> float:
    """Run the first rounds once more and return the seconds.

    The same clients are drawn every time. From the second block on, each of them therefore has a state to go on from.
    Among 10^6 clients none would return by chance.
    """
    ours.experiment.settle()  # the last block's checkpoint deletes versions of rounds that come again
    ours.state = replace(ours.state, round=0)
    return ours.rounds(block)


def peak_memory(config: RunConfig, block: int) -> Memory:
    """Run two blocks in a fresh process and return its peak memory.

    :raises FedcoreError: the process failed, or this system does not tell the peak.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_two_blocks, config.model_dump_json(), block).result()
        except Exception as error:  # of the run, or of the process: it is killed where memory is short
            raise FedcoreError(
                f"scale with {config.clients} clients: the process measured for memory ended: {error}"
            ) from error


def _two_blocks(config: str, block: int) -> Memory:
    try:
        with engine(RunConfig.model_validate_json(config)) as ours:
            for _ in range(2):
                same_rounds(ours, block)
            return peaks()
    except FedcoreError as error:  # the parent cannot unpickle every subclass
        raise FedcoreError(str(error)) from None


def peaks() -> Memory:
    """Return the peaks of this process and of its largest child so far."""
    own, *workers = map(_peak, (os.getpid(), *children()))
    if own is None:
        raise FedcoreError("peak memory is read from /proc/<pid>/status, which this system does not have")
    return Memory(own, max((peak for peak in workers if peak is not None), default=None))


def _peak(process: int) -> float | None:
    """Return a process's peak in MiB, as Linux counts it (VmHWM); None if the process has ended."""
    try:
        peak = re.search(r"^VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(peak[1]) / 1024 if peak else None
