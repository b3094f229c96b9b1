"""Frozen models of a round: their outputs, cached per round.

Without augmentation a sample's frozen outputs do not change within a round. They are computed once per sample, in
fixed chunks of the client's sample order, so that the bits do not depend on the batch or plugin that reads them first.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedcore.base.tensors import copy_into
from fedcore.data.client_data import ClientData
from fedcore.models import Outputs, SplitModel
from fedcore.models.placement import forward_chunk


class FrozenModel:
    """A copy of the model in eval mode without parameter gradients, reused from client to client."""

    def __init__(self, template: SplitModel) -> None:
        self.module = copy.deepcopy(template).requires_grad_(False).eval()
        self._state = self.module.state_dict()
        self._cache: Outputs | None = None
        self.present = False

    def load(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Load the weights for another client or round; None where there is no such model."""
        self._cache = None
        self.present = tensors is not None
        copy_into(self._state, tensors or {})

    def outputs(self, x: Any) -> Outputs:
        """Return features and logits of a batch."""
        with torch.no_grad():
            return Outputs(*self.module(x))

    def cached_outputs(self, positions: Tensor, data: ClientData) -> Outputs:
        """Return features and logits of a client's samples by position (an index on the device)."""
        if self._cache is None:
            self._cache = all_outputs(self.module, data)
        return Outputs(self._cache.features[positions], self._cache.logits[positions])


def all_outputs(model: SplitModel, data: ClientData, positions: Tensor | None = None) -> Outputs:
    """Return a model's outputs on a client's samples (default all), in the given order and fixed chunks."""
    order = torch.arange(len(data)) if positions is None else positions
    order = order.to(data.labels.device)
    with torch.no_grad():
        chunks = [model(data.inputs(part)) for part in order.split(forward_chunk(order.device))]
    return Outputs(torch.cat([c.features for c in chunks]), torch.cat([c.logits for c in chunks]))
