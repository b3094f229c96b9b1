"""Processor time per client, by part of the engine: what a client costs next to its steps.

Processor time wavers less than the clock when other work runs on the machine. Three sides take turns: the engine in
this process, the engine with one worker process, and the bare steps (the reference's ``Trainer.step`` on batches of the
same size). One more run in this process times the parts: their functions note when they begin and end. The time of a
part does not include the parts that it calls, and the time of a checkpoint does not include the thread that writes it.
Messages are the time that the engine with one worker takes more than the engine in this process.
"""

from __future__ import annotations

import functools
import pkgutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedcore_bench.measure import EngineRounds, Spread, children, configured, engine, in_turn
from fedcore_bench.reference import Task, Trainer, cohort
from fedcore_bench.workloads import Workload

_CLIENT, _SERVER, _RUNS = "fedcore.client", "fedcore.server", "fedcore.runs"

PARTS: Mapping[str, Sequence[str]] = {
    "task and session": [f"{_CLIENT}.runtime.ClientRuntime.handle_together"],
    "weights in": [
        f"{_CLIENT}.working_model.WorkingModel.load",
        f"{_CLIENT}.working_model.WorkingModel.load_frozen",
        f"{_CLIENT}.session.LocalSession.prepare_training",
    ],
    "epochs and batches": [f"{_CLIENT}.runner.drain"],
    "steps": [f"{_CLIENT}.runner.take_step"],
    "hooks": ["fedcore.hooks.plugins.PluginSet._invoke"],
    "weights out": [f"{_CLIENT}.runtime.ClientRuntime._finish"],
    "state": [
        "fedcore.client.store.ClientStore.read",
        "fedcore.client.store.ClientStore.write",
        "fedcore.base.plugin_state.States.snapshot",
    ],
    "checks": [f"{_SERVER}.validation.UpdateValidator.update", f"{_SERVER}.validation.UpdateValidator.check"],
    "fold": [f"{_SERVER}.aggregation.RunningMean.add", f"{_SERVER}.aggregation.aggregate"],
    "server": [f"{_RUNS}.training.run_round"],
    "evaluation": [f"{_RUNS}.evaluation.Evaluator.evaluate"],
    "records and checkpoint": [
        "fedcore.base.files.RecordFile.append",
        f"{_RUNS}.training.Experiment.checkpoint",
    ],
}
"""Part -> the functions whose time counts for it, without the other parts that they call."""

REST = "rest"
MESSAGES = "messages"


class PartClock:
    """Adds up the processor time of this thread by part.

    :ivar seconds: by part, until a part last began or ended.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = [REST]
        self._since = time.thread_time()

    def _turn(self) -> None:
        now = time.thread_time()
        self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time counts for a part."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self._turn()
            self._inside.append(part)
            try:
                return function(*arguments, **named)
            finally:
                self._turn()
                self._inside.pop()

        return call


@dataclass(frozen=True)
class Profile:
    """Milliseconds of processor time per client; a round's other costs are divided among its clients.

    :param total: the engine in this process.
    :param with_worker: the engine with one worker process, both processes together.
    :param steps: the bare steps.
    :param beyond: ``total`` minus the bare steps, block by block.
    :param beyond_with_worker: ``with_worker`` minus the bare steps, block by block.
    :param parts: by name, the largest first.
    """

    name: str
    total: Spread
    with_worker: Spread
    steps: Spread
    beyond: Spread
    beyond_with_worker: Spread
    parts: dict[str, float]
    clients: int
    blocks: int
    rounds: int


def profile(workload: Workload, *, blocks: int, block: int | None = None) -> Profile:
    """Return where the processor's time of a workload's clients goes, on a CPU."""
    block = block or workload.block
    with ExitStack() as stack:
        inside, outside, watched = (
            stack.enter_context(engine(configured(workload, {"device": "cpu", "workers": workers})))
            for workers in (0, 1, 0)
        )
        federation = inside.experiment.federation
        steps = BareSteps(Task.of(federation.config, federation.dataset, federation.partition))
        sides = [lambda: _processor(inside, block), lambda: _processor(outside, block), lambda: steps.rounds(block)]
        found = in_turn(sides, blocks)
        watched.rounds(block)
        parts = by_part(watched, block)
    scale = 1000 / (block * federation.config.cohort_size)
    inner, outer, bare = ([scale * seconds for seconds in side] for side in found)
    parts = {part: scale * seconds for part, seconds in parts.items()}
    parts[MESSAGES] = Spread.of([two - one for one, two in zip(inner, outer, strict=True)]).median
    return Profile(
        workload.name,
        Spread.of(inner),
        Spread.of(outer),
        Spread.of(bare),
        Spread.of([all_of_it - step for all_of_it, step in zip(inner, bare, strict=True)]),
        Spread.of([all_of_it - step for all_of_it, step in zip(outer, bare, strict=True)]),
        dict(sorted(parts.items(), key=lambda item: -item[1])),
        federation.config.cohort_size,
        blocks,
        block,
    )


def by_part(ours: EngineRounds, count: int) -> dict[str, float]:
    """Run rounds in this process and return the seconds by part."""
    clock = PartClock()
    with ExitStack() as stack:
        for part, names in PARTS.items():
            for name in names:
                stack.enter_context(mock.patch(name, clock.timed(part, pkgutil.resolve_name(name))))
        ours.rounds(count)
    return dict(clock.seconds)


class BareSteps:
    """The optimizer steps of a round's clients, and nothing else."""

    def __init__(self, task: Task) -> None:
        self.task, self.trainer = task, Trainer(task, torch.device("cpu"), torch.channels_last)
        self.number = 0

    def rounds(self, count: int) -> float:
        """Take the steps of rounds; returns seconds of processor time."""
        spent = 0.0
        self.trainer.model.train()
        for _ in range(count):
            batches = [batch for client in cohort(self.task, self.number) for batch in self._batches(client)]
            self.number += 1
            self.trainer.begin()
            began = time.process_time()
            for rows in batches:
                self.trainer.step(rows)
            spent += time.process_time() - began
        return spent

    def _batches(self, client: int) -> Iterator[Tensor]:
        config, held = self.task.config, self.task.holds[client]
        for _ in range(config.local_epochs):
            yield from held[torch.randperm(len(held), generator=self.trainer.stream)].split(config.batch_size)


def _processor(ours: EngineRounds, count: int) -> float:
    """Run rounds; returns the seconds of processor time of this process and of all its workers."""
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *map(_clock_of, children())]
    before = [time.clock_gettime(clock) for clock in clocks]
    ours.rounds(count)
    return sum(time.clock_gettime(clock) - then for clock, then in zip(clocks, before, strict=True))


def _clock_of(process: int) -> int:
    """Return the id of another process's processor clock, as Linux's ``clock_getcpuclockid`` does."""
    return (~process << 3) | 2
