"""Local training: the loop over local epochs and batches, one optimizer step, and the mini-batch as plugins see it.

Every method trains through :func:`train`. Methods differ in the hooks that a step calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedcore.base.errors import PluginContractError
from fedcore.base.seeding import random_stream
from fedcore.client.context import context_of
from fedcore.client.objective import SecondPass, objective, random_state, replace_gradients
from fedcore.client.session import LocalSession
from fedcore.client.setup import require_shared
from fedcore.data.client_data import Picked
from fedcore.hooks.contexts import ClientContext, Step, View
from fedcore.models import Outputs, SplitModel


@dataclass(eq=False)
class Batch:
    """One mini-batch of one client, for one step. The views of all plugins share it."""

    session: LocalSession
    epoch: int
    number: int
    """The batch's number in the epoch, from 0."""
    picked: Picked
    _frozen: dict[str, Outputs | None] = field(default_factory=dict, init=False)

    @cached_property
    def x(self) -> Any:
        """The model's input. It is gathered when a step first reads it."""
        return self.session.data.inputs_of(self.picked)

    def part(self, rows: Tensor | slice | None) -> Batch:
        """Return a batch with some rows of this one, for another pass of the same step; None means all rows."""
        if rows is None:
            return self
        some = (None if part is None else part[rows] for part in self.picked)
        return replace(self, picked=Picked(*some))  # type: ignore[arg-type]

    def frozen(self, name: str) -> Outputs | None:
        """Return a frozen model's outputs on this batch; they are computed at most once."""
        if name not in self._frozen:
            model, data = self.session.working.frozen[name], self.session.data
            if not model.present:
                self._frozen[name] = None
            elif data.varies or not self.session.work.sees_all_samples:
                self._frozen[name] = model.outputs(self.x)
            else:
                self._frozen[name] = model.cached_outputs(self.picked.positions, data)
        return self._frozen[name]


RunSteps = Callable[[LocalSession, Iterable[Batch]], None]
"""A step runner. It takes a step on each batch of a local epoch before it draws the next batch.

This is the one seam for speed. :func:`run_steps` is the plain runner. ``captured_steps`` replays CUDA graphs. The lanes
of ``branches`` drive several sessions, and take their batches from :func:`batches`.
"""


def train(session: LocalSession, epochs: Iterable[int], run_steps: RunSteps) -> None:
    """Train one client for some local epochs. The model is in eval mode afterwards."""
    for epoch in epochs:
        session.begin_epoch(epoch)
        with random_stream(session.epoch_seed(epoch), session.working.device):
            run_steps(session, batches(session, epoch))
    session.end_epochs()


def batches(session: LocalSession, epoch: int) -> Iterator[Batch]:
    """Yield the batches of a local epoch, and count their steps. With ``--local-steps`` it ends after the last step.

    Batches that are too small are left out, but they have a number.
    """
    data, work = session.data, session.work
    order = torch.randperm(len(data), generator=session.generator(f"shuffle/{epoch}"))
    augment = partial(session.generator, f"augment/{epoch}")
    for number, picked in enumerate(data.batches(order, session.config.batch_size, augment)):
        if session.steps == work.most_steps:
            return
        if len(picked.positions) >= work.smallest_batch:
            yield Batch(session, epoch, number, picked)
            session.steps += 1


def run_steps(session: LocalSession, batches: Iterable[Batch]) -> None:
    """Take the steps one by one: the plain step runner."""
    for batch in batches:
        take_step(session, batch)


ViewOf = Callable[[Batch, Outputs], "BatchStep"]
"""Makes the step that plugins see, from a batch and the model's outputs on it."""


def take_step(session: LocalSession, batch: Batch, view: ViewOf | None = None) -> None:
    """Take one optimizer step.

    :param view: makes the step that plugins see; default :class:`BatchStep`.
    """
    view, plugins = view or BatchStep, session.plugins
    changes = plugins.implements("gradients")
    random = random_state(session.working.device) if changes else None
    step, total = _forward(session, batch, view)
    session.optimizer.zero_grad()
    try:
        total.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise _edited(session) from error
        raise
    if changes:
        second = SecondPass(session, lambda rows: _forward(session, batch.part(rows), view, record=False)[1], random)
        _change_gradients(session, step._with(_second=second))
    if session.config.clip_norm is not None:
        nn.utils.clip_grad_norm_(session.working.trained.values(), session.config.clip_norm)
    if plugins.implements("observe"):
        with torch.no_grad():
            plugins.call_all("observe", step=step)
    session.optimizer.step()


def _forward(session: LocalSession, batch: Batch, view: ViewOf, *, record: bool = True) -> tuple[BatchStep, Tensor]:
    """Take the forward pass of a batch; return the step that plugins see, and the objective."""
    with session.autocast():
        step = view(batch, Outputs(*session.working.module(batch.x)))
        return step, objective(session, step, record=record)


def _edited(session: LocalSession) -> PluginContractError:
    """Return the error for a tensor that autograd needs and that was edited. Autograd does not know who edited it."""
    hooks = [
        f"plugin {plugin.name!r} hook {hook}"
        for hook in ("task_loss", "local_loss")
        for plugin in session.plugins.implementers(hook)
    ]
    who = " or ".join([*hooks, "the model"])
    return PluginContractError(
        f"{who} (round {session.round + 1}, client {session.client}) edits a tensor in place, which the gradient "
        "needs. Hint: clone it first (z = z.clone()), or write z = z + 1 instead of z += 1"
    )


def _change_gradients(session: LocalSession, step: BatchStep) -> None:
    """Let the plugin that implements ``gradients`` replace the model's gradients."""
    trained = session.working.trained
    given = MappingProxyType({name: p.grad for name, p in trained.items() if p.grad is not None})
    with torch.no_grad():
        for plugin, found in session.plugins.each("gradients", step=step, gradients=given):
            if found is not None:
                replace_gradients(session, plugin, found)


class BatchStep(View, Step):
    """One mini-batch, as one plugin sees it; see :class:`fedcore.hooks.contexts.Step`."""

    _argument = "step"
    _instead = "compute with a variable of your own, and return a loss from task_loss or local_loss"
    x: Any
    y: Tensor
    indices: Tensor
    features: Tensor
    logits: Tensor
    _batch: Batch
    _plugin: str
    _second: SecondPass | None
    _sealed = True

    def __init__(self, batch: Batch, outputs: Outputs) -> None:
        x, picked, (features, logits) = batch.x, batch.picked, outputs
        given = {"x": x, "y": picked.labels, "indices": picked.positions, "features": features, "logits": logits}
        vars(self).update(_batch=batch, _plugin="", _second=None, **given)

    def scoped(self, plugin: str) -> BatchStep:
        """Return the view of one plugin."""
        return self._with(_plugin=plugin)

    def _with(self, **changes: Any) -> BatchStep:
        view = object.__new__(type(self))
        vars(view).update(vars(self), **changes)  # at once, for speed: a view is made for each batch and hook
        return view

    @property
    @override
    def client(self) -> ClientContext:
        return context_of(self._batch.session, self._plugin)

    @property
    @override
    def model(self) -> SplitModel:
        return self._batch.session.working.module

    @property
    @override
    def round(self) -> int:
        return self._batch.session.round

    @property
    @override
    def rounds(self) -> int:
        return self._batch.session.config.rounds

    @property
    @override
    def progress(self) -> float:
        return self.round / self.rounds

    @property
    @override
    def epoch(self) -> int:
        return self._batch.epoch

    @property
    @override
    def added(self) -> Mapping[str, nn.Parameter]:
        return self._batch.session.requests.added.get(self._plugin, {})

    @property
    @override
    def parameters(self) -> list[nn.Parameter]:
        session = self._batch.session
        if not session.working.shared:  # in this epoch, or in the whole run
            require_shared(session.plugins, session.working.layout, self._plugin)
        return list(session.working.shared.values())

    @property
    @override
    def reference(self) -> list[Tensor]:
        return self._batch.session.reference

    @override
    def frozen(self, name: str) -> Outputs | None:
        self._require(name)
        return self._batch.frozen(name)

    @property
    @override
    def global_model(self) -> SplitModel:
        self._require("global")
        return self._batch.session.working.frozen["global"].module

    @property
    @override
    def previous_model(self) -> SplitModel | None:
        self._require("previous")
        previous = self._batch.session.working.frozen["previous"]
        return previous.module if previous.present else None

    @override
    @contextmanager
    def random(self, purpose: str) -> Iterator[None]:
        batch = self._batch
        seed = batch.session.derive_seed(f"{purpose}/{batch.epoch}/{batch.number}")
        with random_stream(seed, batch.session.working.device):
            yield

    @override
    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        if self._second is None:
            found = "calls step.gradients_at, which works in the hook gradients only"
            raise self._batch.session.broken(self._plugin, found)
        return self._second.gradients_at(weights, rows)

    def _require(self, model: str) -> None:
        self._batch.session.plugins.require_reads(model, self._plugin)
