"""Processor time per client, by part of the engine: what a client costs next to its steps.

Processor time wavers less than the clock when other work runs on the machine. Three sides take turns: the engine in
this process, the engine with one worker process, and the bare steps (the reference's ``Trainer.step`` on batches of the
same size). One more run in this process times the parts: an alarm looks again and again in whose module it is. The
time of a part does not include the parts that it calls, and the time of a checkpoint does not include the thread that
writes it. Messages are the time that the engine with one worker takes more than the engine in this process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Self

import torch
from torch import Tensor

from fedcore_bench.measure import EngineRounds, Spread, children, configured, engine, in_turn
from fedcore_bench.reference import Task, Trainer, cohort
from fedcore_bench.workloads import Workload

PARTS: Mapping[str, Sequence[str]] = {
    "task and session": ["client.runtime", "client.session"],
    "weights in": ["client.working_model"],
    "epochs and batches": ["client.runner", "data"],
    "steps": ["client.loop", "client.objective", "client.optimizer", "client.context"],
    "hooks": ["hooks"],
    "state": ["client.store", "base.plugin_state"],
    "checks": ["server.validation"],
    "fold": ["server.aggregation"],
    "server": ["server", "engines"],
    "evaluation": ["client.evaluation", "runs.evaluation"],
    "records and checkpoint": ["runs", "base.files"],
}
"""Part -> the modules of fedcore whose time counts for it, with what they call outside of the parts, such as torch.

Of two modules of which one holds the other, the inner one counts.
"""

REST = "rest"
MESSAGES = "messages"


TICK = 0.002
"""Seconds between two looks of :class:`PartClock`. Alarms every 0.5 ms made rounds a third longer, every 2 ms none."""

MORE = 4
"""How many blocks the clock looks at: a part of a twentieth of the time is then seen some sixty times."""


class PartClock:
    """Adds up the processor time of this thread by part, in a block of the main thread.

    An alarm looks where the program is. The time since the last look counts for the innermost module of a part there.
    The alarm waits for the end of a call into C, however long, whose time thus counts for its caller.

    :ivar seconds: by part.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]] = PARTS, package: str = "fedcore") -> None:
        self.seconds = dict.fromkeys((*parts, REST), 0.0)
        self._part_of = {f"{package}.{module}": part for part, modules in parts.items() for module in modules}
        self._known: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        """Begin."""
        self._before = signal.signal(signal.SIGALRM, self._look)
        self._since = time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        now, part = time.thread_time(), None
        while frame is not None and part is None:
            part, frame = self._find(frame.f_globals.get("__name__", "")), frame.f_back
        self.seconds[part or REST] += now - self._since
        self._since = time.thread_time()  # the look itself counts for nothing

    def _find(self, module: str) -> str | None:
        """Return the part that a module counts for; None for that of its caller."""
        if module not in self._known:
            names = module.split(".")
            outer = (".".join(names[:length]) for length in range(len(names), 0, -1))
            self._known[module] = next((self._part_of[name] for name in outer if name in self._part_of), None)
        return self._known[module]


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
        seconds = in_turn(sides, blocks)
        watched.rounds(block)
        parts = {part: seconds / MORE for part, seconds in by_part(watched, MORE * block).items()}
    scale = 1000 / (block * federation.config.cohort_size)
    inner, outer, bare = ([scale * block_seconds for block_seconds in side] for side in seconds)
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
    with PartClock() as clock:
        ours.rounds(count)
    return clock.seconds


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
