"""The gradient of a mean loss over a client's samples, outside of training."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

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


def mean_gradients(
    model: SplitModel, data: ClientData, names: Collection[str], positions: Tensor | None, loss: MeanLoss
) -> Tensors:
    """Return the gradient of a mean loss over a client's samples (default all), in the given order and fixed chunks.

    :param names: of the parameters; one that the loss does not depend on has gradient 0.
    """
    order = torch.arange(len(data)) if positions is None else positions
    order = order.to(data.labels.device)
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
