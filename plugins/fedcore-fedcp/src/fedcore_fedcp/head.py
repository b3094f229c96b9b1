"""FedCP's classifier: two heads, and the policy network that decides which feature goes to which."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import ConfigError
from fedcore.models import copied
from fedcore_fedcp.equations import context_of


class PolicyNetwork(nn.Module):
    """The conditional policy network, CPN: Linear(d, 2d), LayerNorm, ReLU, and a choice between two per feature.

    In training mode the choice is a soft Gumbel-softmax at temperature 1; in eval mode it is the softmax, without
    noise.

    :param width: d, the width of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return r (B, d) in (0, 1), the share of each feature that is personal, for policy inputs (B, d)."""
        scores = self.layers(x).unflatten(1, (2, -1))  # (B, 2d) -> (B, 2, d)
        shares = F.gumbel_softmax(scores, dim=1) if self.training else scores.softmax(1)
        return shares[:, 0]


class ConditionalHead(nn.Module):
    """P(r * h) + H((1 - r) * h) with r = CPN(h * v): personal head P, global head H, context v.

    :param head: the classifier that it takes the place of; becomes H, and P starts as its copy.
    :param width: d, the width of the features h.
    :raises ConfigError: ``head`` has no linear layers, or they do not lead from the features to the logits.
    """

    context: Tensor

    def __init__(self, head: nn.Module, width: int) -> None:
        super().__init__()
        self.head = head
        self.personal = copied(head)
        self.policy = PolicyNetwork(width)
        # The head of a client that has not trained one: drawn, as in the authors' code.
        self.register_buffer("context", F.normalize(torch.rand(width), dim=0))
        self._check(width)

    def forward(self, h: Tensor) -> Tensor:
        """Return logits (B, C) of features (B, d)."""
        r = self.policy(h * self.context)  # (B, d)
        logits: Tensor = self.personal(r * h) + self.head((1 - r) * h)
        return logits

    def renew_context(self) -> None:
        """Take the context of the personal head as it is now."""
        with torch.no_grad():
            self.context.copy_(context_of(self._weights()))

    def _weights(self) -> list[Tensor]:
        return [module.weight for module in self.personal.modules() if isinstance(module, nn.Linear)]

    def _check(self, width: int) -> None:
        weights = self._weights()
        widths = [width, *(len(weight) for weight in weights)]
        if not weights or any(weight.shape[1] != entering for weight, entering in zip(weights, widths)):
            raise ConfigError(
                "fedcp needs a classifier of linear layers, one behind the other, on the features; this model's is "
                f"{self.head}"
            )
