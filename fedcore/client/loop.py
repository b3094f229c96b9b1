"""Local training: the single loop over local epochs and batches.

Every method trains through :func:`local_epochs` and :func:`train_batch`; methods differ in the hooks that these call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedcore.base.errors import PluginContractError
from fedcore.base.seeding import random_stream
from fedcore.base.types import Loss
from fedcore.client.second_pass import SecondPass, replace_gradients, trained_parameters
from fedcore.client.session import LocalSession
from fedcore.client.step import Batch, BatchStep
from fedcore.data.client import Picked
from fedcore.hooks.contexts import Step
from fedcore.hooks.plugin import Plugin
from fedcore.hooks.plugins import PluginSet
from fedcore.models import Outputs

Done = TypeVar("Done")

TakeStep = Callable[[LocalSession, int, int, Picked], object]
"""Takes one optimizer step of a session: epoch, number of the batch in it, batch."""


@dataclass(frozen=True)
class LocalEpoch:
    """One local epoch of a session: iterating over it gives its batches, each of which has to be trained on at once.

    :param number: the local epoch, from 0.
    """

    session: LocalSession
    number: int

    def __iter__(self) -> Iterator[tuple[int, Picked]]:
        """Yield number and samples of each batch; batches that are too small are left out, but counted."""
        session, data, work = self.session, self.session.data, self.session.work
        order = torch.randperm(len(data), generator=session.generator(f"shuffle/{self.number}"))
        augment = partial(session.generator, f"augment/{self.number}")
        for number, picked in enumerate(data.batches(order, session.config.batch_size, augment)):
            if session.steps == work.most_steps:
                break
            if len(picked.positions) < work.smallest_batch:
                continue
            yield number, picked
            session.steps += 1

    @property
    def seed(self) -> int:
        """The seed of the epoch's random numbers, such as dropout's."""
        return self.session.derive_seed(f"epoch/{self.number}")


def local_epochs(session: LocalSession, start: int, stop: int) -> Iterator[LocalEpoch]:
    """Yield local epochs ``start`` to ``stop - 1`` of one client; leaves the model in eval mode.

    With ``--local-steps`` the last epoch ends with the last step.
    """
    for number in range(start, stop):
        if session.begin_epoch(number) or number == start:
            session.working.modes.switch(training=True)
            for module in session.working.excluded_modules(session.excluded):
                module.eval()  # else BatchNorm's statistics would change
        yield LocalEpoch(session, number)
    session.begin_epoch(None)
    session.working.modes.switch(training=False)


def train_epoch(epoch: LocalEpoch, take_step: TakeStep | None = None) -> None:
    """Take the steps of a local epoch.

    :param take_step: default :func:`train_batch`.
    """
    take_step = take_step or train_batch
    with random_stream(epoch.seed, epoch.session.working.device):
        for number, picked in epoch:
            take_step(epoch.session, epoch.number, number, picked)


def next_epoch(work: Generator[LocalEpoch, None, Done], error: Exception | None = None) -> LocalEpoch | Done:
    """Return the next local epoch of a client's work, or what the work returns at its end.

    :param error: what a step of the epoch before raised.
    """
    try:
        return next(work) if error is None else work.throw(error)
    except StopIteration as ended:
        done: Done = ended.value
        return done


def train_batch(session: LocalSession, epoch: int, number: int, picked: Picked) -> Batch:
    """Take one optimizer step; returns its batch."""
    batch = Batch(session, epoch, number, picked)
    session.depends_on, training = batch.depends_on, session.training
    second = None
    if session.plugins.implements("gradients"):
        second = batch.second = SecondPass(session, lambda part: _forward(session, part, record=False)[1])
    step, total = _forward(session, batch)
    training.optimizer.zero_grad()
    total.backward()
    if second is not None:
        _change_gradients(session, batch, step, second)
    if session.config.clip_norm is not None:
        nn.utils.clip_grad_norm_(training.parameters, session.config.clip_norm)
    if session.plugins.implements("observe"):
        with torch.no_grad():
            session.plugins.call_all("observe", step=step)
    training.optimizer.step()
    session.depends_on = set()  # hooks outside of a step look at no batch
    return batch


def _forward(session: LocalSession, batch: Batch, *, record: bool = True) -> tuple[BatchStep, Tensor]:
    """Take the forward pass of a batch; returns what plugins see of it, and its objective."""
    with session.autocast():
        batch.outputs = Outputs(*session.working.module(batch.x))
        step = BatchStep(batch)
        return step, objective(session, step, record=record)


def _change_gradients(session: LocalSession, batch: Batch, step: BatchStep, second: SecondPass) -> None:
    """Let the plugin that implements ``gradients`` put others in place of the model's."""
    second.begin(batch)
    trained = trained_parameters(session)
    given = MappingProxyType({name: p.grad for name, p in trained.items() if p.grad is not None})
    with torch.no_grad(), second.open():
        for plugin, found in session.plugins.each("gradients", step=step, gradients=given):
            if found is not None:
                replace_gradients(session, plugin, found)


def objective(session: LocalSession, step: Step, *, record: bool = True) -> Tensor:
    """Return task_scale * task + sum of weight * value; a part of scale exactly 0 is left out, and not recorded.

    :param record: whether the parts are added to the client's losses.
    """
    task = task_loss(session.plugins, step)
    task_scale, terms = 1.0, []
    for plugin, result in session.plugins.each("local_loss", step=step):
        for loss in _losses(plugin, result, step):
            task_scale *= _task_scale(plugin, loss)
            if isinstance(loss.weight, Tensor) or loss.weight != 0:
                terms.append(loss.value if _is_one(loss.weight) else loss.weight * loss.value)
                if record:
                    session.losses.add(f"{plugin.name}.{loss.name}" if loss.name else plugin.name, loss.value)
    if task_scale != 0:
        terms.append(task if task_scale == 1.0 else task_scale * task)
        if record:
            session.losses.add("task", task)
    total = sum(terms[1:], terms[0]) if terms else None
    if total is None or not total.requires_grad:
        found = f"give no part of the local objective that depends on the model: task_scale is {task_scale}"
        hint = "return a term that has a gradient, or a task_scale above 0"
        raise PluginContractError.of(None, found, round=session.round, client=session.client, hint=hint)
    return total


def task_loss(plugins: PluginSet, step: Step) -> Tensor:
    """Return the task loss of the one plugin that replaces it, or cross-entropy."""
    for plugin, value in plugins.each("task_loss", step=step):
        if value is None:
            continue
        if not _is_scalar(value):
            raise _no_scalar(plugin, "task_loss", step, value)
        assert isinstance(value, Tensor)
        return value
    raise AssertionError("the built-in plugin has a task loss")


def _task_scale(plugin: Plugin, loss: Loss) -> float:
    if loss.task_scale != 1.0 and not plugin.scales_task:
        found = f"returned task_scale {loss.task_scale} without declaring scales_task = True"
        raise PluginContractError.of(plugin.name, found, hook="local_loss")
    return loss.task_scale


def _is_one(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) and weight == 1.0


def _losses(plugin: Plugin, result: Any, step: Step) -> list[Loss]:
    losses = [] if result is None else result if isinstance(result, list) else [result]
    for loss in losses:
        if not isinstance(loss, Loss):
            raise PluginContractError.of(
                plugin.name,
                f"returned {type(loss).__name__}",
                hook="local_loss",
                round=step.round,
                client=step.client.id,
                expected="Loss, a list of Loss or None",
                hint="wrap it: Loss(value)",
            )
        if not _is_scalar(loss.value):
            raise _no_scalar(plugin, "local_loss", step, loss.value)
    return losses


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _no_scalar(plugin: Plugin, hook: str, step: Step, value: Any) -> PluginContractError:
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return PluginContractError.of(
        plugin.name,
        f"returned a value of {shape}",
        hook=hook,
        round=step.round,
        client=step.client.id,
        expected="a 0-dim tensor",
        hint="did you forget .mean()?",
    )
