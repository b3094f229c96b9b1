"""Clipping several tensors as one vector, with sums in float64, and a bound S that follows a quantile of the norms.

The adaptive bound is that of Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021, arXiv 1905.03871.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all tensors as one vector.

    >>> import torch
    >>> joint_norm([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])])
    5.0
    """
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def clip_factor(norm: float, bound: float) -> float:
    r"""Return :math:`\min(1, S / \|\Delta\|)`, the factor for a vector of this norm.

    :source: McMahan, Ramage, Talwar, Zhang, ICLR 2018, arXiv 1710.06963, FlatClip.

    >>> clip_factor(2.0, 4.0), clip_factor(8.0, 4.0), clip_factor(0.0, 4.0)
    (1.0, 0.5, 1.0)
    """
    return 1.0 if norm <= bound else bound / norm


def update_multiplier(noise_multiplier: float, count_noise: float) -> float:
    r"""Return :math:`z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}`, the multiplier of the updates' noise.

    Sum and count together are then one Gaussian mechanism of multiplier z: a client moves the centred count by a half.

    :param count_noise: sigma_b, the standard deviation of the count's noise; more than z / 2.
    :source: Theorem 1.

    >>> update_multiplier(0.6, 0.5)
    0.75
    """
    return 1 / math.sqrt(1 / noise_multiplier**2 - 1 / (2 * count_noise) ** 2)


def noised_share(centred: float, noise: float, expected_clients: float) -> float:
    r"""Return :math:`\tilde b = \frac{1}{m} (\sum_i (b_i - \frac12) + N(0, \sigma_b^2)) + \frac12`.

    It estimates the share of updates that were not clipped, b_i = 1 if the norm of update i is at most S.

    :param centred: the sum of b_i - 1/2 over the clients that came.
    :param noise: a normal number of standard deviation sigma_b.
    :source: Algorithm 1, with the centred bits of Theorem 1.

    >>> noised_share(1.5 - 0.5, 0.5, 4)
    0.875
    """
    return (centred + noise) / expected_clients + 0.5


def next_clip(clip: float, share: float, quantile: float, rate: float) -> float:
    r"""Return :math:`S \exp(-\eta_S (\tilde b - \gamma))`, the bound of the next round.

    :source: Algorithm 1.

    >>> next_clip(2.0, 0.5, 0.5, 0.2), round(next_clip(2.0, 1.0, 0.5, 0.2), 6)
    (2.0, 1.809675)
    """
    return clip * math.exp(-rate * (share - quantile))
