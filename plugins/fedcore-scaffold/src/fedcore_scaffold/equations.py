"""SCAFFOLD's equations (Karimireddy et al., ICML 2020, arXiv 1910.06378), one function each."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore.functional import effective_steps


def correction(like: Tensor, control: Tensor | None, own: Tensor | None) -> Tensor:
    """Return c - c_i, what is added to every local gradient, laid out in memory like the parameter ``like``.

    :param control: c; None is 0, before the server has one.
    :param own: c_i; None is 0, before the client's first participation.
    :source: Eq. 3: y_i <- y_i - eta_l (g_i(y_i) + c - c_i).
    """
    result = torch.zeros_like(like)
    if control is not None:
        result.add_(control)
    return result if own is None else result.sub_(own)


def renewed_control(
    start: Tensor, trained: Tensor, corrected: Tensor | None, *, lr: float, steps: int, momentum: float
) -> Tensor:
    """Return c_i+ = c_i - c + (x - y_i) / (eta_l A(K_i)): the client's mean gradient over its local training.

    :param start: x, the model that the client received; ``trained`` y_i.
    :param corrected: c - c_i; None is 0.
    :param lr: eta_l of this round; ``steps`` K_i that were executed; ``momentum`` rho of local SGD.
    :source: Eq. 4, Option II, with A(K) for K: by so many gradients K steps with momentum move the weights.
        Without momentum A(K) = K. K itself would put c_i in units of up to 1 / (1 - rho) gradients, while it enters
        as one gradient: that diverges for A(K) > 2 K.
    """
    gradient = (start - trained) / (lr * effective_steps(steps, momentum))
    return gradient if corrected is None else gradient - corrected


def server_update(start: Tensor, mean: Tensor, server_lr: float) -> Tensor:
    """Return x + eta_g mean_S(y_i - x).

    :source: Eq. 5, first half.
    """
    return start + server_lr * (mean - start)
