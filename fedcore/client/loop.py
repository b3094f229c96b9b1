"""Local training: the single loop over local epochs and batches, and what plugins see of a mini-batch.

Every method trains through :func:`local_epochs` and :func:`train_batch`; methods differ in the hooks that these call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedcore.base.errors import PluginContractError
from fedcore.base.seeding import random_stream
from fedcore.client.context import context_of
from fedcore.client.objective import objective
from fedcore.client.second_pass import SecondPass, replace_gradients, trained_parameters
from fedcore.client.session import LocalSession
from fedcore.client.setup import require_shared
from fedcore.data.client_data import Picked
from fedcore.hooks.contexts import ClientContext, Step, View
from fedcore.models import Outputs, SplitModel

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
            session.working.module.train()
            for module in session.working.excluded_modules(session.excluded):
                module.eval()  # else BatchNorm's statistics would change
        yield LocalEpoch(session, number)
    session.begin_epoch(None)
    session.working.module.eval()


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
    finally:
        del error  # from Python 3.13 on its traceback has this frame: the client's session would wait for the collector


def train_batch(session: LocalSession, epoch: int, number: int, picked: Picked) -> Batch:
    """Take one optimizer step; returns its batch."""
    batch = Batch(session, epoch, number, picked)
    session.depends_on, training = batch.depends_on, session.training
    second = None
    if session.plugins.implements("gradients"):
        second = batch.second = SecondPass(session, lambda part: _forward(session, part, record=False)[1])
    step, total = _forward(session, batch)
    training.optimizer.zero_grad()
    try:
        total.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise _edited(session) from error
        raise
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


def _edited(session: LocalSession) -> PluginContractError:
    """Return what to say where autograd finds a tensor edited that it needs; it does not know by whom."""
    hooks = [
        f"plugin {plugin.name!r} hook {hook}"
        for hook in ("task_loss", "local_loss")
        for plugin in session.plugins.implementers(hook)
    ]
    who = " or ".join([*hooks, "the model"])
    return PluginContractError(
        f"{who} (round {session.round + 1}, client {session.client}) edits a tensor in place, which the gradient "
        "needs. Hint: clone it first (z = z.clone()), or write z = z + 1 in place of z += 1"
    )


def _change_gradients(session: LocalSession, batch: Batch, step: BatchStep, second: SecondPass[Batch]) -> None:
    """Let the plugin that implements ``gradients`` put others in place of the model's."""
    second.begin(batch)
    trained = trained_parameters(session)
    given = MappingProxyType({name: p.grad for name, p in trained.items() if p.grad is not None})
    with torch.no_grad(), second.open():
        for plugin, found in session.plugins.each("gradients", step=step, gradients=given):
            if found is not None:
                replace_gradients(session, plugin, found)


class Batch:
    """One mini-batch of one client, shared by the views of all plugins.

    :ivar second: takes further passes, where a plugin implements ``gradients``.
    :ivar depends_on: which of ``round``, ``client``, ``epoch`` and ``batch`` hooks read; a captured step has their
        values compiled in, so it can be replayed only where these are the same.
    """

    def __init__(self, session: LocalSession, epoch: int, number: int, picked: Picked) -> None:
        self.session, self.epoch, self.number = session, epoch, number
        self.picked = picked
        self.x = session.data.inputs_of(picked)
        self.indices, self.y = picked.positions, picked.labels
        self.outputs: Outputs
        self.depends_on: set[str] = set()
        self.second: SecondPass[Batch] | None = None
        self._frozen: dict[str, Outputs | None] = {}

    def part(self, rows: Tensor | slice | None) -> Batch:
        """Return a batch of some rows of this one, for another pass of the same step; None for all rows."""
        if rows is None:
            part = copy.copy(self)
        else:
            some = (None if field is None else field[rows] for field in self.picked)
            part = Batch(self.session, self.epoch, self.number, Picked(*some))  # type: ignore[arg-type]
            part.depends_on = self.depends_on
        part.second = None
        return part

    def frozen(self, name: str) -> Outputs | None:
        """Return a frozen model's outputs on this batch, computed at most once."""
        if name not in self._frozen:
            model = self.session.working.frozen[name]
            if not model.present:
                self._frozen[name] = None
            elif self.session.data.varies or not self.session.work.sees_all_samples:
                self._frozen[name] = model.outputs(self.x)
            else:
                self._frozen[name] = model.cached_outputs(self.indices, self.session.data)
        return self._frozen[name]


class BatchStep(View, Step):
    """What a plugin sees of one mini-batch; documented in :class:`fedcore.hooks.contexts.Step`."""

    _argument = "step"
    _instead = "compute with a variable of your own, and return a loss from task_loss or local_loss"
    x: Any
    y: Tensor
    indices: Tensor
    features: Tensor
    logits: Tensor
    _batch: Batch
    _sealed = True

    def __init__(self, batch: Batch, plugin: str | None = None) -> None:
        features, logits = batch.outputs
        given = {"x": batch.x, "y": batch.y, "indices": batch.indices, "features": features, "logits": logits}
        vars(self).update(_batch=batch, _plugin=plugin, **given)  # not one by one: made for each batch and hook

    def scoped(self, plugin: str) -> Step:
        """Return the view of one plugin."""
        return BatchStep(self._batch, plugin)

    @property
    @override
    def client(self) -> ClientContext:
        self._batch.depends_on.add("client")
        return context_of(self._batch.session, self._plugin or "")

    @property
    @override
    def model(self) -> SplitModel:
        return self._batch.session.working.module

    @property
    @override
    def round(self) -> int:
        self._batch.depends_on.add("round")
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
        self._batch.depends_on.add("epoch")
        return self._batch.epoch

    @property
    @override
    def added(self) -> Mapping[str, nn.Parameter]:
        self._batch.depends_on.add("client")
        return self._batch.session.requests.added.get(self._plugin or "", {})

    @property
    @override
    def parameters(self) -> list[nn.Parameter]:
        session = self._batch.session
        if not session.training.shared:  # none in this epoch, or in the whole run
            require_shared(session.plugins, session.working.layout, self._plugin or "")
        return session.training.shared

    @property
    @override
    def reference(self) -> list[Tensor]:
        return self._batch.session.training.reference

    @override
    def frozen(self, name: str) -> Outputs | None:
        self._require(name)
        self._batch.depends_on.add("client")
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
        self._batch.depends_on.add("client")
        previous = self._batch.session.working.frozen["previous"]
        return previous.module if previous.present else None

    @override
    @contextmanager
    def random(self, purpose: str) -> Iterator[None]:
        batch = self._batch
        batch.depends_on.add("batch")
        seed = batch.session.derive_seed(f"{purpose}/{batch.epoch}/{batch.number}")
        with random_stream(seed, batch.session.working.device):
            yield

    @override
    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        second = self._batch.second
        if second is None or not second.is_open:
            raise PluginContractError.of(
                self._plugin or "",
                "calls step.gradients_at, which works in the hook gradients only",
                round=self._batch.session.round,
                client=self._batch.session.client,
            )
        return second.gradients_at(self._batch, weights, rows)

    def _require(self, model: str) -> None:
        self._batch.session.plugins.require_reads(model, self._plugin or "")
