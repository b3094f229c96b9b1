# --8<-- [start:nearest]
"""FedProto's prediction (Tan et al., AAAI 2022, arXiv 2105.00243)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedcore import SplitModel
from fedcore.models import Outputs


class NearestPrototype(nn.Module):
    """A model that predicts the class whose prototype is nearest: logits are -||z - C_c||^2.

    :param model: gives the features z; ``prototypes`` (C, d); ``known`` (C,) bool. A class that is not known is never
        predicted: its logit lies below all others.
    """

    prototypes: Tensor
    known: Tensor

    def __init__(self, model: SplitModel, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("prototypes", prototypes)  # buffers: an export of the weights holds them
        self.register_buffer("known", known)

    def forward(self, x: Tensor) -> Outputs:
        """Return features (B, d) and logits (B, C)."""
        features, _ = self.model(x)
        logits = -(features.unsqueeze(1) - self.prototypes).square().sum(dim=2)  # (B, C)
        lowest = logits.min(dim=1, keepdim=True).values - 1  # (B, 1)
        return Outputs(features, torch.where(self.known, logits, lowest))


# --8<-- [end:nearest]
