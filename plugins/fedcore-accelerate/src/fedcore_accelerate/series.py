"""Clients that no hook sees, one after the other in one session: what a client's training costs besides its steps.

The steps are the core's, so that the results are those of one by one to the last bit. A session, its contexts and
its optimizer are made once per round instead of once per client. The global generators are seeded for each client only
if its steps draw from them, as dropout does.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress

import torch

from fedcore import ClientUpdate
from fedcore.client import (
    Batch,
    Begin,
    LocalSession,
    LocalWork,
    LossTotals,
    OneByOne,
    Setup,
    WorkingModel,
    drain,
    epochs_of,
    refuse_edits,
    take_step,
)
from fedcore.engines import ClientRuntime, ClientTask, Outcome, SharedPayload
from fedcore_accelerate.random_stream import Generators, draws_refused
from fedcore_accelerate.stacked_step import NotStackable
from fedcore_accelerate.whole import OF_ONE_CLIENT

OF_CLIENTS = (*OF_ONE_CLIENT, "begin_local", "task_loss", "local_loss", "end_local")
"""Hooks on the client that would see a session, and could keep what they read of it."""


FEW = 4
"""To look whether steps have drawn takes as long as to seed the generators for so many clients."""


class Series:
    """Trains clients that keep nothing and that no hook sees in one session, all others one by one."""

    together = 1

    def working(self, setup: Setup) -> WorkingModel:
        """Return the only working model."""
        self._alone = OneByOne()
        self._working = working = self._alone.working(setup)
        self._applies = not (
            any(map(setup.plugins.implementers, OF_CLIENTS)) or setup.breaks or setup.layout.personal or working.frozen
        )
        return working

    _alone: OneByOne
    _one: LocalSession | None = None
    _shared: weakref.ref[SharedPayload] | None = None
    """The broadcast of the round that the session is for. Both are freed when the engine drops the broadcast."""
    _draws: bool | None = None
    """Whether steps draw from the global generators; None before the first client."""

    def run(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome]:
        """Take all steps; see :class:`fedcore.client.runner.Runner`."""
        first = [self._trained(task, begin) for task in tasks[: self._draws is None]]
        outcomes = first + self._unseeded(tasks[len(first) :], begin)
        outcomes += [self._trained(task, begin) for task in tasks[len(outcomes) :]]
        return [outcome or self._alone.run([task], begin)[0] for task, outcome in zip(tasks, outcomes, strict=True)]

    def _unseeded(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome | None]:
        """Return outcomes as :meth:`_trained` does, of steps that do not draw; empty if some may, or for few tasks."""
        if self._draws is False and len(tasks) > FEW:
            with suppress(NotStackable), draws_refused(torch.device("cpu")):
                return [self._trained(task, begin, seeded=False) for task in tasks]
            self._draws = True  # these are the first clients whose steps draw
        return []

    def _trained(self, task: ClientTask, begin: Begin, *, seeded: bool = True) -> Outcome | None:
        """Return a client's outcome; None if it has to be trained by itself, which then also says why it cannot."""
        if not self._applies or task.kind != "fit_begin" or task.version is not None or task.tensors:
            return None
        runtime: ClientRuntime = begin.runtime
        began = time.perf_counter()
        try:
            one = self._next(task, begin)
            self._take(epochs_of(one, range(one.work.epochs)), seeded=seeded)
            refuse_edits(one)
            losses = one.losses.means()
        except Exception as error:  # a model can raise anything
            self._one = None
            return runtime.failed(task, error)
        if not losses or not all(map(math.isfinite, losses.values())):
            return None  # it took no step, or diverged
        return ClientUpdate(
            client=task.client,
            model=runtime.setup.uploads.join(one.working.state),
            samples=len(one.data),
            steps=one.steps,
            lr=one.lr,
            momentum=one.config.momentum,
            metrics={"losses": losses},
            seconds=time.perf_counter() - began,
            plugin_seconds=dict.fromkeys(runtime.setup.plugins.seconds, 0.0),
        )

    def _take(self, training: Generator[Batch, None, None], *, seeded: bool) -> None:
        """Take the steps of a client."""
        if not seeded:
            for batch in training:
                take_step(batch)
        else:
            drain(training, self._watched if self._draws is None else take_step)
            self._draws = bool(self._draws)

    def _watched(self, batch: Batch) -> None:
        """Take a step, and note whether it draws."""
        generators = Generators(batch.session.working.device)
        take_step(batch)
        if generators.have_drawn:
            self._draws = True

    def _next(self, task: ClientTask, begin: Begin) -> LocalSession:
        """Return the session with the client's samples, the round's weights and fresh optimizer state."""
        runtime: ClientRuntime = begin.runtime
        one = self._one
        if one is None or self._shared is None or self._shared() is not begin.shared:
            assert begin.shared is not None
            one = runtime.session(task, begin.shared, working=self._working)
            one.prepare_training()
            self._one, self._shared = one, weakref.ref(begin.shared, self._forget)
            return one
        one.client, one.steps, one.losses = task.client, 0, LossTotals({})
        one.data = runtime.samples_of(task.client)
        one.work = LocalWork.of(one.config, len(one.data), self._working.smallest_batch, task.meta)
        self._working.load(one.start)
        one.optimizer.begin(one.optimizer.parameters)
        return one

    def _forget(self, shared: weakref.ref[SharedPayload]) -> None:
        if shared is self._shared:
            self._one = self._shared = None
