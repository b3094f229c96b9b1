"""FedALA's adaptive local aggregation (Zhang et al., AAAI 2023, arXiv 2212.01197), one function each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torch import Tensor

from fedcore import Tensors


def mixed(own: Tensor, received: Tensor, share: Tensor) -> Tensor:
    """Return Theta_i + (Theta - Theta_i) * W_i, element by element.

    :param own: Theta_i, the client's model after its last participation; ``received`` Theta; ``share`` W_i in [0, 1].
    """
    return own + (received - own) * share


def mixture(own: Tensors, received: Tensors, shares: Tensors) -> Tensors:
    """Return :func:`mixed` of every tensor in ``shares``, by name."""
    return {name: mixed(own[name], received[name], share) for name, share in shares.items()}


def renewed_share(share: Tensor, gradient: Tensor, own: Tensor, received: Tensor, eta: float) -> Tensor:
    """Return W_i - eta * gradient * (Theta - Theta_i), element by element, clipped to [0, 1].

    :param gradient: of the loss in :func:`mixed`; by the chain rule times Theta - Theta_i it is that in W_i.

    >>> import torch
    >>> one = torch.ones(1)
    >>> renewed_share(one, 0.25 * one, one, 3 * one, 1.0), renewed_share(one, -one, one, 3 * one, 1.0)
    (tensor([0.5000]), tensor([1.]))
    """
    return (share - eta * gradient * (received - own)).clamp(0, 1)


def settled(losses: Sequence[float], count: int, threshold: float) -> bool:
    """Return whether the last ``count`` losses vary less than a threshold, by their standard deviation.

    Where the last one is not finite, further learning cannot help, and the core reports the client as diverged.

    >>> settled([3.0, 1.0, 1.0], 2, 0.1), settled([3.0, 1.0], 2, 0.1), settled([1.0], 2, 0.1)
    (True, False, False)
    """
    if not math.isfinite(losses[-1]):
        return True
    return len(losses) >= count and statistics.pstdev(losses[-count:]) < threshold
