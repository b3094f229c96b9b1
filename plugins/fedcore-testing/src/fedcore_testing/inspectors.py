"""What a hook returned. An inspector looks at one call's result: it reports findings and does not raise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedcore import ClientUpdate, Loss
from fedcore.client import BatchStep
from fedcore.hooks import problem_with
from fedcore_testing.findings import SENT, Call, Rule
from fedcore_testing.fingerprint import by_path, fingerprint

IDLE_STEPS = 12
"""After so many steps with a value, but a gradient of 0, a term counts as one that trains nothing."""


def _loss(call: Call, result: Any) -> None:
    if call.hook == "task_loss":
        terms: list[Any] = [] if result is None else [Loss(result)]
    elif call.hook == "local_loss":
        terms = [] if result is None else result if isinstance(result, list) else [result]
    else:
        return
    for term in terms:
        if not isinstance(term, Loss):
            call.report(Rule.LOSS, f"returns {type(term).__name__}, expected Loss, a list of Loss or None")
        elif term.value is None:
            continue  # there is no such term in this step
        elif not isinstance(term.value, Tensor) or term.value.ndim:
            shape = tuple(term.value.shape) if isinstance(term.value, Tensor) else type(term.value).__name__
            call.report(Rule.LOSS, f"returns a value of {shape}, expected a tensor of shape (); forgot .mean()?")
        elif isinstance(term.weight, Tensor) or term.weight != 0:
            if not bool(term.value.isfinite()):
                call.report(Rule.LOSS, f"returns {term.value.item()}")
            if not _trains(call.arguments.get("step"), term, f"{call.hook} {term.name}", call.idle):
                call.report(Rule.LOSS, "returns a term without a gradient to the local model, which trains nothing")


def _trains(step: Any, term: Loss, name: str, idle: dict[str, float]) -> bool:
    """Return whether a gradient of a term reaches what the client trains: the model, or parameters that were added.

    A gradient of 0 may be chance, such as that of a clipped term. It is not if the gradient was 0 in each of
    :data:`IDLE_STEPS` steps in which the term had a value.

    :param name: of the term, with its hook.
    :param idle: name -> in how many steps of the run it had a value, but a gradient of 0 only; updated.
    """
    if not term.value.requires_grad or not isinstance(step, BatchStep):
        return bool(term.value.requires_grad)
    added = (parameter for each in step._batch.session.requests.added.values() for parameter in each.values())
    trained = [parameter for parameter in (*step.model.parameters(), *added) if parameter.requires_grad]
    slopes = torch.autograd.grad(term.value, trained, retain_graph=True, allow_unused=True)
    gradients = [gradient for gradient in slopes if gradient is not None]
    if any(bool(gradient.any()) for gradient in gradients):
        idle[name] = -math.inf
    elif bool(term.value != 0):
        idle[name] = idle.get(name, 0) + 1
    return bool(gradients) and idle.get(name, 0) < IDLE_STEPS


def _sent(call: Call, result: Any) -> Any:
    """Return the tensors that a hook sends, by name; ``guard_upload``: of all plugins, by ``plugin/name``."""
    if not isinstance(result, ClientUpdate):
        return result
    return by_path(result.payload) if call.hook == "guard_upload" else result.payload


def _payload(call: Call, result: Any) -> None:
    if call.hook not in SENT:
        return
    tensors = _sent(call, result)
    problem = problem_with("end_local", tensors)
    if problem:
        call.report(Rule.PAYLOAD, problem.removesuffix(" or None"))
        return
    for name, tensor in (tensors or {}).items():
        if not bool(tensor.isfinite().all()):
            call.report(Rule.PAYLOAD, f"sends {name!r} with values that are not finite")


def _samples(call: Call, result: Any) -> None:
    """Search the uploads for one of the client's inputs, value for value."""
    tensors = _sent(call, result)
    if call.hook not in SENT or call.client is None or not isinstance(tensors, Mapping):
        return
    data = call.client._session.data
    batch = data.inputs(torch.arange(len(data)))
    if not isinstance(batch, Tensor):
        return
    inputs = batch.flatten(1).double()  # (n, numbers of one input)
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.numel() % inputs.shape[1] == 0:
            rows = tensor.detach().cpu().double().reshape(-1, inputs.shape[1])
            if any(bool((inputs == row).all(dim=1).any()) for row in rows):
                call.report(Rule.SAMPLES, f"sends {name!r}, which holds a client's own inputs")


def _gradients(call: Call, result: Any) -> None:
    if call.hook != "gradients" or problem_with(call.hook, result):
        return
    for name, tensor in (result or {}).items():
        if not bool(tensor.isfinite().all()):
            call.report(Rule.GRADIENTS, f"returns {name!r} with values that are not finite")


INSPECTORS = (_loss, _gradients, _payload, _samples)


def repeated(call: Call, first: Any, second: Any) -> None:
    """Compare a hook's result with that of a second call."""
    if fingerprint(dict(first or {})) != fingerprint(dict(second or {})):
        call.report(Rule.BROADCAST, "gives other tensors when it is called again")
