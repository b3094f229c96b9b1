"""The local objective of a step: the task loss and the terms of all plugins, checked and added up."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedcore.base.errors import PluginContractError
from fedcore.base.types import Loss
from fedcore.client.session import LocalSession
from fedcore.hooks.contexts import Step
from fedcore.hooks.plugin import Plugin
from fedcore.hooks.plugins import PluginSet


def objective(session: LocalSession, step: Step, *, record: bool = True) -> Tensor:
    """Return task_scale * task + sum of weight * value; a part of scale exactly 0 is left out, and not recorded.

    :param record: whether the parts are added to the client's losses.
    :raises PluginContractError: a hook returned something else, or edited a tensor that other plugins see.
    """
    before = _versions(step)
    task = task_loss(session.plugins, step)
    if _versions(step) != before:
        raise _edits(session.plugins.implementers("task_loss")[0], "task_loss", step, before)
    task_scale, terms = 1.0, []
    for plugin, result in session.plugins.each("local_loss", step=step):
        if _versions(step) != before:
            raise _edits(plugin, "local_loss", step, before)
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


def _versions(step: Step) -> tuple[int, int, int]:
    """Return how often torch saw the tensors edited that all plugins share; it costs no look at their values."""
    return step.y._version, step.features._version, step.logits._version


def _edits(plugin: Plugin, hook: str, step: Step, before: tuple[int, int, int]) -> PluginContractError:
    edited = [name for name, one, other in zip(("y", "features", "logits"), before, _versions(step)) if one != other]
    return PluginContractError.of(
        plugin.name,
        f"edits step.{edited[0]} in place, which all plugins share",
        hook=hook,
        round=step.round,
        client=step.client.id,
        hint=f"edit a copy: step.{edited[0]}.clone()",
    )


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
