"""The equations of FedCP as pure functions.

The paper is Zhang, Hua, Wang, Song, Xue, Ma, Guan, KDD 2023, arXiv 2307.01217; what it leaves open is taken from the
authors' code, TsingZ0/FedCP.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""The a of the Gaussian kernels exp(-d^2 / (2 a)), from the authors' code."""


def context_of(weights: Iterable[Tensor]) -> Tensor:
    """Return the client's context v / |v|_2, (d,): v is the sum over classes of the personal head's weights.

    :param weights: the linear layers' weights, in the order in which they are called; of several the product counts.

    >>> context_of([torch.tensor([[1.0, 2.0], [2.0, 2.0]])])
    tensor([0.6000, 0.8000])
    """
    product = reduce(lambda below, weight: weight @ below, weights)  # (C, d)
    return F.normalize(product.detach().sum(0), dim=0)  # (d,)


def maximum_mean_discrepancy(x: Tensor, y: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{B^2} \sum_{ij} \sum_a [k_a(x_i, x_j) + k_a(y_i, y_j) - 2 k_a(x_i, y_j)]`.

    k_a are Gaussian kernels of four :data:`BANDWIDTHS`; the diagonal is included (the biased estimate). ``x`` and
    ``y`` (B, d) give (); equal ones give exactly 0. Capture-safe; computed in float32 at least.

    >>> maximum_mean_discrepancy(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    tensor(0.2324)
    """
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        x, y = x.to(dtype), y.to(dtype)
        # Distances do not depend on the origin; their digits do, as differences of squared norms.
        origin = y.detach().mean(0)
        x, y = x - origin, y - origin
        return (_kernels(x, x) + _kernels(y, y) - 2 * _kernels(x, y)).mean()


def mixed_head(personal: Tensor, received: Tensor) -> Tensor:
    """Return a tensor of the head that a client uploads: 0.5 * personal + 0.5 * global."""
    return 0.5 * personal + 0.5 * received


def _kernels(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the kernels of every row of x with every row of y, (B, B)."""
    squares_x, squares_y = x.square().sum(1), y.square().sum(1)  # (B,) each
    distances = squares_x.unsqueeze(1) + squares_y - 2 * (x @ y.mT)  # (B, B)
    kernels = [torch.exp(-0.5 * distances / a) for a in BANDWIDTHS]
    return torch.stack(kernels).sum(0)
