"""The local objective of a step, with checks of its terms, and its gradient at other weights or on some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.seeding import global_generators
from fedcore.base.types import Loss
from fedcore.client.session import LocalSession
from fedcore.hooks.contexts import Step
from fedcore.hooks.plugin import Plugin


def require_gradient(session: LocalSession, total: Tensor) -> None:
    """Refuse an objective that does not depend on the model. Inside of ``vmap`` this cannot be seen."""
    if not total.requires_grad:
        fault = "give no part of the local objective that depends on the model"
        hint = "return a term that has a gradient, or a task_scale above 0"
        raise session.broken(None, fault, hint=hint)


def total_loss(session: LocalSession, step: Step, *, record: bool = True) -> Tensor:
    """Return task_scale * task + sum of weight * value. A part with weight 0 is left out, and is not recorded.

    :param record: whether to add the parts to the client's losses.
    :raises PluginContractError: a hook returned a wrong type or shape, or edited a tensor that other plugins see.
    """
    versions = _versions(step)
    task = _task_loss(session, step, versions)
    task_scale = 1.0
    parts: list[tuple[str, float | Tensor, Tensor]] = []
    for plugin, result in session.plugins.each("local_loss", step=step):
        _check_unedited(session, plugin, "local_loss", step, versions)
        for loss in [] if result is None else result if isinstance(result, list) else [result]:
            _check_loss(session, plugin, loss)
            task_scale *= loss.task_scale
            if loss.value is not None:
                parts.append((f"{plugin.name}.{loss.name}" if loss.name else plugin.name, loss.weight, loss.value))
    parts = [part for part in (*parts, ("task", task_scale, task)) if isinstance(part[1], Tensor) or part[1] != 0]
    if record:
        for name, _, value in parts:
            session.losses.add(name, value)
    terms = [value if not isinstance(weight, Tensor) and weight == 1 else weight * value for _, weight, value in parts]
    return sum(terms[1:], terms[0]) if terms else torch.zeros(())


def _task_loss(session: LocalSession, step: Step, versions: Mapping[str, int]) -> Tensor:
    """Return the task loss of the plugin that replaces it, or cross-entropy."""
    for plugin, value in session.plugins.each("task_loss", step=step):
        _check_unedited(session, plugin, "task_loss", step, versions)
        if value is not None:
            return _check_scalar(session, plugin, "task_loss", value)
    raise AssertionError("the built-in plugin has a task loss")


def _versions(step: Step) -> dict[str, int]:
    """Return how often the tensors that all plugins see were edited. torch counts this: nobody reads their values."""
    return {"y": step.y._version, "features": step.features._version, "logits": step.logits._version}


def _check_unedited(session: LocalSession, plugin: Plugin, hook: str, step: Any, versions: Mapping[str, int]) -> None:
    edited = [name for name, tensor, version in step._batch.lent if tensor._version != version]
    for name in [*edited, *(name for name, version in _versions(step).items() if version != versions[name])]:
        fault = f"edits step.{name} in place, which all plugins share"
        raise session.broken(plugin.name, fault, hook=hook, hint=f"edit a copy: step.{name}.clone()")


def _check_loss(session: LocalSession, plugin: Plugin, loss: Any) -> None:
    if not isinstance(loss, Loss):
        fault, expected = f"returned {type(loss).__name__}", "Loss, a list of Loss or None"
        raise session.broken(plugin.name, fault, hook="local_loss", expected=expected, hint="wrap it: Loss(value)")
    if loss.value is not None:
        _check_scalar(session, plugin, "local_loss", loss.value)
    if loss.task_scale != 1.0 and not plugin.scales_task:
        fault = f"returned task_scale {loss.task_scale} without declaring scales_task = True"
        raise session.broken(plugin.name, fault, hook="local_loss")


def _check_scalar(session: LocalSession, plugin: Plugin, hook: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 0:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        fault, expected, hint = f"returned a value of {shape}", "a 0-dim tensor", "did you forget .mean()?"
        raise session.broken(plugin.name, fault, hook=hook, expected=expected, hint=hint)
    return value


Rows = Tensor | slice | None
"""Positions in a batch; None for the whole batch."""


class SecondPass:
    """Takes further passes of one step, for the hook ``gradients``.

    A pass leaves no trace: afterwards the weights, the buffers, the plugins' notes and the random stream are as after
    the first pass. All copies are on the device, so that the whole step can be replayed there.

    :param evaluate: takes the forward pass on rows of the batch; returns the objective without recording it.
    :param before: :meth:`Memory.random_state` before the first pass.
    """

    def __init__(self, session: LocalSession, evaluate: Callable[[Rows], Tensor], before: Tensor | None) -> None:
        self._session, self._evaluate, self.before = session, evaluate, before

    def gradients_at(self, weights: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
        """Return the gradient of the whole objective by name; see :class:`fedcore.hooks.contexts.Step`."""
        trained = self._session.working.trained
        with self._undisturbed(trained, weights), self._same_numbers(), torch.enable_grad():
            total = self._evaluate(rows)
            gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        return {name: gradient for name, gradient in zip(trained, gradients) if gradient is not None}

    @contextmanager
    def _undisturbed(self, trained: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Load weights for a block. Afterwards restore the weights, the buffers and the plugins' notes."""
        session = self._session
        notes = {plugin: dict(values) for plugin, values in session.scratch.items()}
        replaced = [trained[name] for name in weights]
        tensors = [*replaced, *session.working.module.buffers(), *_tensors_in(notes)]
        with torch.no_grad():
            copies = [tensor.clone() for tensor in tensors]
            for parameter, value in zip(replaced, weights.values()):
                parameter.copy_(value)
        try:
            yield
        finally:
            # Every tensor, as torch counts no edit of BatchNorm's statistics; and through .data, as a note may be a
            # received tensor: the copy must not count as an edit of it.
            for tensor, value in zip(tensors, copies):
                tensor.data.copy_(value)
            for plugin, noted in session.scratch.items():
                noted.clear()
                noted.update(notes.get(plugin, {}))

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        """Draw the random numbers of the first pass again in a block, so that dropout drops the same units."""
        if self.before is None:
            yield
            return
        generator = global_generators(self._session.working.device)[-1]
        state = generator.get_state()
        generator.set_state(self.before)
        try:
            yield
        finally:
            generator.set_state(state)


def change_gradients(session: LocalSession, step: Step) -> None:
    """Let the plugin that implements ``gradients`` replace the model's gradients. Names left out are not updated.

    :raises PluginContractError: a name or a shape does not fit.
    """
    trained = {name: p for name, p in session.working.trained.items() if p.grad is not None}
    gradients = MappingProxyType({name: p.grad for name, p in trained.items()})
    with torch.no_grad():
        for plugin, replacements in session.plugins.each("gradients", step=step, gradients=gradients):
            if replacements is None:
                continue
            names = "the names that it was given"
            session.check_fit(replacements, trained, plugin=plugin.name, hook="gradients", names=names)
            for name, parameter in trained.items():
                if name not in replacements:
                    parameter.grad = None
                elif replacements[name] is not parameter.grad:
                    parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(replacements[name])


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings and sequences; expanded tensors, which cannot be edited, are left out."""
    if isinstance(value, Tensor):
        if not any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape)):
            yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)
