"""The equations of FedRoD's personal head (Chen, Chao, ICLR 2022, arXiv 2107.00778): its loss and predictor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import SplitModel
from fedcore.models import Outputs


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
