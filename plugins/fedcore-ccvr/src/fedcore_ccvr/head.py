"""The transformation that makes features more Gaussian, and a classifier that uses it after its calibration."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def tukey(x: Tensor, power: float) -> Tensor:
    """Return ReLU, then Tukey's ladder of powers: ``max(x, 0) ** power``, its gradient 0 (not inf) at 0.

    >>> tukey(torch.tensor([-1.0, 0.0, 4.0]), 0.5)
    tensor([0., 0., 2.])
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).pow(power), 0.0)


class TukeyLinear(nn.Linear):
    """A linear classifier that, once ``calibrated``, reads transformed features in eval mode.

    In training mode it is a plain linear layer. During the rounds it is not calibrated yet, and the calibration trains
    it on features that are already transformed.

    :param linear: the layer whose weights it uses.
    :param power: the exponent of :func:`tukey`.
    """

    calibrated: Tensor

    def __init__(self, linear: nn.Linear, power: float) -> None:
        # On "meta" no random numbers are drawn. The weights are replaced at once.
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.power = power
        self.register_buffer("calibrated", torch.zeros(1, dtype=torch.bool, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C) of features (B, d)."""
        if not self.training:
            x = torch.where(self.calibrated, tukey(x, self.power), x)
        return super().forward(x)

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows between the brackets."""
        return f"{super().extra_repr()}, power={self.power}"
