"""q-FedAvg's arithmetic (Li, Sanjabi, Beirami, Smith, ICLR 2020, arXiv 1905.10497), Algorithm 2."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-10
"""Added to every loss, as in the authors' code: F^(q-1) has no value at 0 for q < 1."""


def fair_weight(loss: float, q: float) -> float:
    """Return F_k(w_t)^q, how much client k's gradient counts in that of f_q (Eq. 2).

    >>> round(fair_weight(3.0, 2.0), 6), fair_weight(0.0, 0.0)
    (9.0, 1.0)
    """
    return float((loss + FLOOR) ** q)


def bend(loss: float, squared_movement: float, q: float) -> float:
    """Return q F_k^(q-1) |w_t - y_k|^2: what q adds to the curvature h_k of F_k^(q+1) / (q+1), over L^2 (Lemma 3).

    >>> round(bend(3.0, 0.5, 2.0), 6)  # 2 * 3 * 0.5
    3.0
    """
    return q * fair_weight(loss, q - 1) * squared_movement


def step_factor(weights: float, bends: float, lipschitz: float) -> float:
    """Return L sum_k F_k^q / sum_k h_k, the share of the way from w_t to the weighted mean of the y_k.

    ``weights`` is sum_k F_k^q and ``bends`` the sum of :func:`bend`, so that sum_k h_k = L^2 ``bends`` + L ``weights``.

    >>> step_factor(9.0, 3.0, 10.0) == 90 / (300 + 90)
    True
    """
    return lipschitz * weights / (lipschitz**2 * bends + lipschitz * weights)


def fair_step(current: Tensor, mean: Tensor, factor: float) -> Tensor:
    """Return w_t - sum_k F_k^q Delta w_k / sum_k h_k, in the shape of w_t.

    ``mean`` is the mean of the y_k with the weights F_k^q, ``factor`` that of :func:`step_factor`.

    >>> fair_step(torch.zeros(2), torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 0.5000, -1.0000])
    """
    return torch.lerp(current, mean, factor)
