"""Algebra against client drift: control variates (SCAFFOLD, FedDC) and sums of displacements (FedDyn, FedDC).

All tensors have the shape of one parameter. A value that a client or the server does not have yet is None and counts as
0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore_functional.terms import effective_steps


def correction(like: Tensor, control: Tensor | None, own: Tensor | None, weight: float = 1.0) -> Tensor:
    """Return c / W_i - c_i, the correction of every local gradient.

    :param like: the parameter; the result has its layout in memory.
    :param control: c, None before the server has one; ``own`` c_i, None before the client's first participation.
    :param weight: W_i, the weight of the client's loss among all clients'.
    :source: SCAFFOLD (Karimireddy et al., ICML 2020, arXiv 1910.06378), Eq. 3: y_i <- y_i - eta_l (g_i(y_i) + c - c_i);
        FedDC (Gao et al., CVPR 2022, arXiv 2203.11751), the gradient correction G_i, with W_i as in its code.

    >>> correction(torch.zeros(1), torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """
    result = torch.zeros_like(like)
    if control is not None:
        result.add_(control, alpha=1 / weight)
    return result if own is None else result.sub_(own)


def renewed_control(
    start: Tensor, trained: Tensor, corrected: Tensor | None, *, lr: float, steps: int, momentum: float
) -> Tensor:
    """Return c_i+ = c_i - c + (x - y_i) / (eta_l A(K_i)): the client's mean gradient over its local training.

    :param start: x, the model that the client started from; ``trained`` y_i.
    :param corrected: c - c_i, from :func:`correction`.
    :param lr: eta_l of this round; ``steps`` K_i, the executed steps; ``momentum`` rho of local SGD.
    :source: SCAFFOLD, Eq. 4, Option II, with A(K) for K; FedDC's code computes its s_i so. K steps with momentum move
        the weights by A(K) gradients; without momentum A(K) = K. K itself would put c_i in units of up to 1 / (1 - rho)
        gradients, while it enters as one gradient. That diverges for A(K) > 2 K.

    >>> renewed_control(torch.tensor([1.0]), torch.tensor([-1.0]), None, lr=0.5, steps=2, momentum=0.0)
    tensor([2.])
    """
    gradient = (start - trained) / (lr * effective_steps(steps, momentum))
    return gradient if corrected is None else gradient - corrected


def shifted_target(start: Tensor, displacement: Tensor | None) -> Tensor:
    """Return w_t - d_i, the point to which a client's quadratic term pulls.

    :param start: w_t; ``displacement`` d_i, None before the client's first participation.
    :source: FedDyn (Acar et al., ICLR 2021, arXiv 2111.04263), Eq. 1, with d_i = lambda_i: F_i(w) - <g_i, w> + alpha/2
        |w - w_t|^2 = F_i(w) + alpha/2 |w - (w_t - lambda_i)|^2 + constant. FedDC, penalty |h_i + w - w_t|^2, with
        d_i = h_i.
    """
    return start.clone() if displacement is None else start - displacement


def renewed_displacement(displacement: Tensor | None, start: Tensor, trained: Tensor) -> Tensor:
    """Return d_i + (y_i - w_t), the sum of a client's displacements after its local training.

    :source: FedDyn, Algorithm 1: g_i <- g_i - alpha (y_i - w_t), the gradient of F_i at y_i where y_i solves Eq. 1;
        FedDC, Algorithm 1: h_i <- h_i + (y_i - w_t).
    """
    return trained - start if displacement is None else displacement + (trained - start)


def renewed_mean_displacement(displacement: Tensor, start: Tensor, mean: Tensor, share: float) -> Tensor:
    """Return the mean of d_i over ALL clients after a round, float64.

    :param displacement: the same mean before the round, float64.
    :param mean: the plain mean of y_i over the clients that took part; ``share`` their share of all clients.
    :source: FedDyn, Algorithm 1: h <- h - alpha (1/N) sum over S of (y_i - w_t).
    """
    return displacement + share * (mean.double() - start.double())


def displaced_mean(mean: Tensor, displacement: Tensor) -> Tensor:
    """Return w_{t+1} = mean over S of y_i + mean over ALL of d_i, in the dtype of ``mean``.

    :source: FedDyn, Algorithm 1: w_{t+1} = (1/|S|) sum over S of y_i - h / alpha; FedDC's code (its paper writes the
        mean of y_i + h_i).
    """
    return (mean.double() + displacement).to(mean.dtype)
