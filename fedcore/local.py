"""Local training: THE ONLY loop over epochs and batches.

Every method trains through :func:`train_epochs`; what distinguishes methods are the hooks that it calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.client import ClientContext, LocalSession
from fedcore.data.client import Picked
from fedcore.errors import PluginContractError
from fedcore.frozen import FrozenModel
from fedcore.models import Outputs, SplitModel
from fedcore.plugins import Plugin, PluginSet
from fedcore.seeding import random_stream
from fedcore.types import Loss


class Batch:
    """One mini-batch of one client, shared by the views of all plugins.

    :ivar depends_on: which of ``round``, ``client``, ``epoch`` and ``batch`` hooks looked at; what a captured step
        took from them is fixed, so it can be replayed only where they are the same.
    """

    def __init__(self, session: LocalSession, epoch: int, number: int, picked: Picked) -> None:
        self.session, self.epoch, self.number = session, epoch, number
        self.x = session.data.inputs_of(picked)
        self.indices, self.y = picked.positions, picked.labels
        self.outputs: Outputs
        self.depends_on: set[str] = set()
        self._frozen: dict[str, Outputs | None] = {}

    def frozen(self, name: str) -> Outputs | None:
        """Return a frozen model's outputs on this batch, computed at most once."""
        if name not in self._frozen:
            model = self.session.frozen[name]
            if not model.present:
                self._frozen[name] = None
            elif self.session.data.varies or not self.session.sees_all_samples:
                self._frozen[name] = model.outputs(self.x)
            else:
                self._frozen[name] = model.cached_outputs(self.indices, self.session.data)
        return self._frozen[name]


class Step:
    """What a plugin sees of one mini-batch.

    :ivar x: the model's input: (B, ...), or a batch object of the data set's kind; ``y`` labels (B,) int64;
        ``indices`` positions in the client's training part (B,).
    :ivar features: encoder(x), (B, d); ``logits`` classifier(features), (B, C).
    """

    def __init__(self, batch: Batch, plugin: str | None = None) -> None:
        self._batch = batch
        self._plugin = plugin
        self.x, self.y, self.indices = batch.x, batch.y, batch.indices
        self.features, self.logits = batch.outputs

    def scoped(self, plugin: str) -> Step:
        """Return the view of one plugin."""
        return Step(self._batch, plugin)

    @property
    def client(self) -> ClientContext:
        """The client that trains."""
        self._batch.depends_on.add("client")
        return self._batch.session.context(self._plugin or "")

    @property
    def model(self) -> SplitModel:
        """The local model in training."""
        return self._batch.session.model

    @property
    def round(self) -> int:
        """The round, from 0."""
        self._batch.depends_on.add("round")
        return self._batch.session.round

    @property
    def rounds(self) -> int:
        """The number of rounds, T."""
        return self._batch.session.config.rounds

    @property
    def progress(self) -> float:
        """round / rounds: 0 in the first round, (T - 1) / T in the last."""
        return self.round / self.rounds

    @property
    def epoch(self) -> int:
        """The local epoch, from 0: the pass over the client's samples, the last cut short by ``--local-steps``."""
        self._batch.depends_on.add("epoch")
        return self._batch.epoch

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in ``begin_local``."""
        self._batch.depends_on.add("client")
        return self._batch.session.added.get(self._plugin or "", {})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable shared parameters."""
        return self._batch.session.shared_parameters

    @property
    def reference(self) -> list[Tensor]:
        """The values of ``parameters`` at the start of the round."""
        return self._batch.session.reference

    def frozen(self, name: str) -> Outputs | None:
        """Return (features, logits) of the ``"global"`` or ``"previous"`` model on this batch; None if there is none.

        :raises PluginContractError: the plugin did not declare that it ``reads`` the model.
        """
        self._require(name)
        self._batch.depends_on.add("client")
        return self._batch.frozen(name)

    @property
    def global_model(self) -> SplitModel:
        """The frozen model that the client started the round from."""
        self._require("global")
        return self._batch.session.frozen["global"].module

    @property
    def previous_model(self) -> SplitModel | None:
        """The client's frozen model of its last committed participation; None on the first."""
        self._require("previous")
        self._batch.depends_on.add("client")
        previous: FrozenModel = self._batch.session.frozen["previous"]
        return previous.module if previous.present else None

    @contextmanager
    def random(self, purpose: str) -> Iterator[None]:
        """Draw from a stream of this purpose, client, round, epoch and batch; the model's dropout is untouched."""
        batch = self._batch
        batch.depends_on.add("batch")
        seed = batch.session.derive_seed(f"{purpose}/{batch.epoch}/{batch.number}")
        with random_stream(seed, batch.session.device):
            yield

    def _require(self, model: str) -> None:
        self._batch.session.runtime.problem.plugins.require_reads(model, self._plugin or "")


def train_epochs(session: LocalSession, plugins: PluginSet, start: int, stop: int) -> None:
    """Run local epochs ``start`` to ``stop - 1`` of one client on its session; leaves the model in eval mode.

    With ``--local-steps`` the last epoch ends with the last step.
    """
    config, model, data = session.config, session.model, session.data
    model.train()
    for module in session.frozen_modules():
        module.eval()  # or BatchNorm's statistics would move on
    take_step = session.runtime.graphs.take_step if session.runtime.graphs else train_batch
    for epoch in range(start, stop):
        order = torch.randperm(len(data), generator=session.generator(f"shuffle/{epoch}"))
        batches = data.batches(order, config.batch_size, session.generator(f"augment/{epoch}"))
        with random_stream(session.derive_seed(f"epoch/{epoch}"), session.device):
            for number, picked in enumerate(batches):
                if session.steps == session.most_steps:
                    break
                if len(picked.positions) < session.smallest_batch:
                    continue
                take_step(session, plugins, epoch, number, picked)
                session.steps += 1
    model.eval()


def train_batch(session: LocalSession, plugins: PluginSet, epoch: int, number: int, picked: Picked) -> Batch:
    """Take one optimizer step; returns its batch."""
    batch = session.batch = Batch(session, epoch, number, picked)
    with session.autocast():
        batch.outputs = Outputs(*session.model(batch.x))
        step = Step(batch)
        total = objective(session, plugins, step)
    session.optimizer.zero_grad()
    total.backward()
    if session.config.clip_norm is not None:
        nn.utils.clip_grad_norm_(session.trained, session.config.clip_norm)
    with torch.no_grad():
        for _ in plugins.each("observe", step=step):
            pass
    session.optimizer.step()
    session.batch = None
    return batch


def objective(session: LocalSession, plugins: PluginSet, step: Step) -> Tensor:
    """Return task_scale * task + sum of weight * value; a part of scale exactly 0 is left out, and not recorded."""
    task = task_loss(plugins, step)
    task_scale, terms = 1.0, []
    for plugin, result in plugins.each("local_loss", step=step):
        for loss in _losses(plugin, result, step):
            task_scale *= _task_scale(plugin, loss)
            if isinstance(loss.weight, Tensor) or loss.weight != 0:
                terms.append(loss.value if _is_one(loss.weight) else loss.weight * loss.value)
                session.losses.add(f"{plugin.name}.{loss.name}" if loss.name else plugin.name, loss.value)
    if task_scale != 0:
        terms.append(task if task_scale == 1.0 else task_scale * task)
        session.losses.add("task", task)
    total = sum(terms[1:], terms[0]) if terms else None
    if total is None or not total.requires_grad:
        raise PluginContractError(
            f"round {step.round}: no part of the local objective depends on the model "
            f"(task_scale is {task_scale}, and no plugin added a term that has a gradient)"
        )
    return total


def task_loss(plugins: PluginSet, step: Step) -> Tensor:
    """Return the task loss of the one plugin that replaces it, or cross-entropy."""
    for plugin, value in plugins.each("task_loss", step=step):
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.ndim != 0:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise _wrong_value(plugin, "task_loss", step, f"returned {shape}", "did you forget .mean()?")
        return value
    raise AssertionError("the built-in plugin has a task loss")


def _task_scale(plugin: Plugin, loss: Loss) -> float:
    if loss.task_scale != 1.0 and not plugin.scales_task:
        raise PluginContractError(
            f"plugin {plugin.name!r} hook local_loss: returned task_scale {loss.task_scale} without "
            "declaring scales_task = True",
            plugin=plugin.name,
            hook="local_loss",
        )
    return loss.task_scale


def _is_one(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) and weight == 1.0


def _losses(plugin: Plugin, result: Any, step: Step) -> list[Loss]:
    losses = [] if result is None else result if isinstance(result, list) else [result]
    for loss in losses:
        if not isinstance(loss, Loss):
            found = f"returned {type(loss).__name__}, expected Loss, a list of Loss or None"
            raise _wrong_value(plugin, "local_loss", step, found, "wrap it: Loss(value)")
        if not isinstance(loss.value, Tensor) or loss.value.ndim != 0:
            shape = tuple(loss.value.shape) if isinstance(loss.value, Tensor) else type(loss.value).__name__
            raise _wrong_value(plugin, "local_loss", step, f"returned a value of {shape}", "did you forget .mean()?")
    return losses


def _wrong_value(plugin: Plugin, hook: str, step: Step, found: str, hint: str) -> PluginContractError:
    return PluginContractError(
        f"plugin {plugin.name!r} hook {hook} (round {step.round}, client {step.client.id}): {found}"
        f"{'' if 'expected' in found else ', expected a 0-dim tensor'}. Hint: {hint}",
        plugin=plugin.name,
        hook=hook,
    )
