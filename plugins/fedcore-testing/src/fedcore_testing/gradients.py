"""Whether a term of the local objective trains anything."""

from __future__ import annotations

import math
from typing import Any

import torch

from fedcore import Loss
from fedcore.client.context import BatchStep

IDLE_STEPS = 12
"""After so many steps with a value, but a gradient of 0, a term counts as one that trains nothing."""


def trains(step: Any, term: Loss, name: str, idle: dict[str, float]) -> bool:
    """Return whether a gradient of a term reaches what the client trains: the model, or parameters that were added.

    One that is 0 may be so by chance, as a clipped term's is; not if it is in every step, while the term has a value.

    :param name: of the term, with its hook.
    :param idle: name -> in how many steps of the run it had a value, but a gradient of 0 only; updated.
    """
    if not term.value.requires_grad or not isinstance(step, BatchStep):
        return term.value.requires_grad
    added = (parameter for each in step._batch.session.requests.added.values() for parameter in each.values())
    trained = [parameter for parameter in (*step.model.parameters(), *added) if parameter.requires_grad]
    found = torch.autograd.grad(term.value, trained, retain_graph=True, allow_unused=True)
    gradients = [gradient for gradient in found if gradient is not None]
    if any(bool(gradient.any()) for gradient in gradients):
        idle[name] = -math.inf
    elif bool(term.value != 0):
        idle[name] = idle.get(name, 0) + 1
    return bool(gradients) and idle.get(name, 0) < IDLE_STEPS
