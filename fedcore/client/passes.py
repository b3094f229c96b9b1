"""Passes over a client's samples outside of its training steps: outputs, mean gradients, and frozen models.

Each pass takes the samples in fixed chunks of the given order, so that the bits do not depend on who asks first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcore.base.tensors import copy_into
from fedcore.base.types import Tensors
from fedcore.data.client_data import ClientData
from fedcore.models import Outputs, SplitModel
from fedcore.models.placement import forward_chunk
from fedcore.models.split import evaluating

MeanLoss = Callable[[Outputs, Tensor], Tensor]
"""Takes a model's outputs and the labels (B,); returns the mean loss, of shape ()."""


def cross_entropy(outputs: Outputs, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, of shape ()."""
    return F.cross_entropy(outputs.logits, labels)


def _order(data: ClientData, positions: Tensor | None) -> Tensor:
    """Return the positions of a pass; default all of the client's samples."""
    return (torch.arange(len(data)) if positions is None else positions).to(data.labels.device)


def all_outputs(model: SplitModel, data: ClientData, positions: Tensor | None = None) -> Outputs:
    """Return a model's outputs on a client's samples (default all), in the given order."""
    order = _order(data, positions)
    with torch.no_grad():
        chunks = [model(data.inputs(part)) for part in order.split(forward_chunk(order.device))]
    return Outputs(torch.cat([c.features for c in chunks]), torch.cat([c.logits for c in chunks]))


def mean_gradients(
    model: SplitModel, data: ClientData, names: Collection[str], positions: Tensor | None, loss: MeanLoss
) -> Tensors:
    """Return the gradient of a mean loss over a client's samples (default all), in the given order.

    :param names: the names of the parameters. A parameter that the loss does not depend on has gradient 0.
    """
    order = _order(data, positions)
    own = {name: p.detach().requires_grad_() for name, p in model.named_parameters() if name in names}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in own.items()}
    with evaluating(model), torch.enable_grad():
        for part in order.split(max(100, forward_chunk(order.device) // 8)):
            outputs = Outputs(*functional_call(model, own, (data.inputs(part),)))
            value = loss(outputs, data.labels[part]) * (len(part) / len(order))
            found = torch.autograd.grad(value, list(own.values()), allow_unused=True)
            for name, gradient in zip(own, found):
                if gradient is not None:
                    total[name].add_(gradient)
    return total


class FrozenModel:
    """A copy of the model in eval mode without parameter gradients, reused from client to client.

    Without augmentation a sample's outputs do not change within a round. They are then computed once per sample.
    """

    def __init__(self, template: SplitModel) -> None:
        self.module = copy.deepcopy(template).requires_grad_(False).eval()
        self._state = self.module.state_dict()
        self._cache: Outputs | None = None
        self.present = False

    def load(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Load the weights for another client or round.

        :param tensors: the weights; None if there is no previous model.
        """
        self._cache = None
        self.present = tensors is not None
        copy_into(self._state, tensors or {})

    def outputs(self, x: Any) -> Outputs:
        """Return features and logits of a batch."""
        with torch.no_grad():
            return Outputs(*self.module(x))

    def cached_outputs(self, positions: Tensor, data: ClientData) -> Outputs:
        """Return features and logits of a client's samples.

        :param positions: the samples' positions; an index on the device.
        """
        if self._cache is None:
            self._cache = all_outputs(self.module, data)
        return Outputs(self._cache.features[positions], self._cache.logits[positions])
