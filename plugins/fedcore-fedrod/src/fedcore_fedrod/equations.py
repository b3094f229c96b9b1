"""The equations of FedRoD (Chen, Chao, ICLR 2022, arXiv 2107.00778): two losses and the sum of two heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import SplitModel
from fedcore.models import Outputs


def log_prior(counts: Tensor, gamma: float) -> Tensor:
    """Return gamma * log n_c, minus infinity where the client has no sample of class c.

    ``counts`` n (C,) integer samples per class, ``gamma`` > 0; the result is (C,) float32.

    >>> import torch
    >>> log_prior(torch.tensor([1, 0]), 2.0)
    tensor([0., -inf])
    """
    return (gamma * counts.double().log()).float()


def balanced_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Return the balanced softmax loss: the mean of -log(n_y^gamma exp(g_y) / sum_c n_c^gamma exp(g_c)), shape ().

    ``logits`` g (B, C) of the generic head, ``labels`` y (B,), ``prior`` (C,) from :func:`log_prior`. A class without
    samples has probability and gradient 0; it must not be a label.
    """
    return F.cross_entropy(logits + prior, labels)


def personal_cross_entropy(generic: Tensor, personal: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of g + h, shape (); its gradient reaches the personal head alone.

    ``generic`` g and ``personal`` h are logits (B, C); ``labels`` (B,).
    """
    return F.cross_entropy(generic.detach() + personal, labels)


class TwoHeads(nn.Module):
    """The personalised predictor: its logits are g + h on the features z.

    :param model: gives z and the generic logits g; ``head`` gives the personal logits h of z.
    """

    def __init__(self, model: SplitModel, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Any) -> Outputs:
        """Return features (B, d) and logits (B, C)."""
        features, logits = self.model(x)
        return Outputs(features, logits + self.head(features))
