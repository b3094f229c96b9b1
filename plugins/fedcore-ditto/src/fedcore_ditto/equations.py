"""Ditto's personal objective, h_k(v; w_t) = F_k(v) + lambda/2 ||v - w_t||^2, and how it is evaluated beside w's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedcore import SplitModel
from fedcore_functional import proximal_term

KNOWN = ("torch.nn.modules.", "fedcore.", "fedcore_functional.", "fedcore_zoo.")
"""How the modules begin whose networks draw random numbers by :data:`DRAWING` alone."""

DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)
"""torch's modules that draw random numbers in training mode, or do so with some option."""


def local_risk(logits: Tensor, labels: Tensor) -> Tensor:
    """Return F_k(v) on a batch: the mean cross-entropy. ``logits`` (B, C), ``labels`` (B,); result of shape ()."""
    return F.cross_entropy(logits, labels)


def distance(personal: Sequence[Tensor], received: Sequence[Tensor]) -> Tensor:
    """Return 1/2 ||v - w_t||^2; its gradient in v is v - w_t. Equally long lists; result of shape ()."""
    return proximal_term(personal, received)


def logits_with(model: SplitModel, tensors: Mapping[str, Tensor], x: Any) -> Tensor:
    """Return the model's logits (B, C) with these parameters and buffers in place of its own.

    Buffers among ``tensors`` (BatchNorm's statistics) are updated in place, the model's own are left alone.
    """
    outputs = functional_call(model, dict(tensors), (x,))
    logits: Tensor = outputs.logits
    return logits


def may_draw(model: nn.Module) -> bool:
    """Say whether a forward pass in training mode may draw random numbers.

    Of modules that are neither torch's nor fedcore's nothing is known: they may.
    """
    return any(
        isinstance(module, DRAWING) or not type(module).__module__.startswith(KNOWN) for module in model.modules()
    )
