"""FedAMP's message passing (Huang et al., AAAI 2021, arXiv 2007.03797): how much of whose model goes into u_i."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcore import Tensors
from fedcore_functional import cosine_similarity_matrix


def squared_distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return |w_i - w_j|^2 over all tensors, in float64."""
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)


def cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return cos(w_i, w_j) over all tensors, in float64; 0 if either is 0."""
    rows = (torch.cat([model[name].double().flatten() for name in one]).unsqueeze(0) for model in (one, other))
    return float(cosine_similarity_matrix(*rows))


def attention(distances: Sequence[float], alpha: float, sigma: float) -> list[float]:
    """Return xi_ij = alpha A'(|w_i - w_j|^2) for j != i, A(x) = 1 - exp(-x / sigma); at most 1 together.

    The paper takes alpha so small that the client's own share, 1 - sum_j xi_ij, is not negative; where it would be, the
    xi_ij are divided by their sum.

    >>> [round(xi, 6) for xi in attention([0.0, 2 * math.log(2)], 0.5, 2.0)]
    [0.25, 0.125]
    >>> attention([0.0, 0.0], 3.0, 1.0)
    [0.5, 0.5]
    """
    shares = [alpha / sigma * math.exp(-distance / sigma) for distance in distances]
    return [share / max(1.0, sum(shares)) for share in shares]


def cosine_attention(cosines: Sequence[float], sigma: float, self_weight: float) -> list[float]:
    """Return xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)) (HeurFedAMP).

    >>> [round(xi, 6) for xi in cosine_attention([1.0, 1.0 - math.log(3)], 1.0, 0.2)]
    [0.6, 0.2]
    """
    top = max(cosines, default=0.0)
    shares = [math.exp(sigma * (value - top)) for value in cosines]
    return [(1 - self_weight) * share / sum(shares) for share in shares]


def mixture(own: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Tensors:
    """Return u_i = (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j, summed in float64.

    >>> mixture({"w": torch.tensor([1.0])}, [{"w": torch.tensor([3.0])}], [0.25])
    {'w': tensor([1.5000])}
    """
    result = {name: (1 - sum(shares)) * w.double() for name, w in own.items()}
    for other, share in zip(others, shares):
        for name, total in result.items():
            total += share * other[name].double()
    return {name: total.to(own[name].dtype) for name, total in result.items()}
