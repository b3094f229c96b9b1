"""FedDyn's equations (Acar et al., ICLR 2021, arXiv 2111.04263), one function each.

The paper keeps g_i, the gradient of the client's loss at its last solution, and h = mean over all g_i. Here, as in the
authors' code, it is lambda_i = -g_i / alpha and its mean -h / alpha: displacements of weights, in which alpha does
not occur, so that a small alpha divides nothing.
"""

from __future__ import annotations

from torch import Tensor


def shifted_target(start: Tensor, dual: Tensor | None) -> Tensor:
    """Return w_t - lambda_i, the point to which the local problem's quadratic pulls.

    :param start: w_t; ``dual`` lambda_i, None before the client's first participation, where it is 0.
    :source: Eq. 1: F_i(w) - <g_i, w> + alpha/2 |w - w_t|^2 = F_i(w) + alpha/2 |w - (w_t - lambda_i)|^2 + constant.
    """
    return start.clone() if dual is None else start - dual


def client_alpha(alpha: float, samples: int, mean_samples: float | None) -> float:
    """Return alpha_i = alpha / (n_i / mean n): the clients' losses count by their samples then.

    At a fixed point alpha_i lambda_i = -grad F_i and the lambda_i have mean 0, so that the sum of n_i grad F_i is 0;
    with one alpha for all it is the sum of grad F_i.

    :param samples: n_i; ``mean_samples`` mean n over all clients, None for one alpha for all.
    :source: the authors' code; the paper has alpha.
    """
    return alpha if mean_samples is None else alpha * (mean_samples / samples)


def renewed_dual(dual: Tensor | None, start: Tensor, trained: Tensor) -> Tensor:
    """Return lambda_i + (y_i - w_t).

    :source: Algorithm 1: g_i <- g_i - alpha (y_i - w_t), the gradient of F_i at y_i where y_i solves Eq. 1.
    """
    return trained - start if dual is None else dual + (trained - start)


def renewed_mean_dual(mean_dual: Tensor, start: Tensor, mean: Tensor, share: float) -> Tensor:
    """Return the mean of lambda_i over ALL clients after a round, float64.

    :param mean_dual: that mean before the round, float64.
    :param mean: the plain mean of y_i over the clients that took part; ``share`` their number by that of all.
    :source: Algorithm 1: h <- h - alpha (1/N) sum over S of (y_i - w_t).
    """
    return mean_dual + share * (mean.double() - start.double())


def corrected_mean(mean: Tensor, mean_dual: Tensor) -> Tensor:
    """Return w_{t+1} = mean over S of y_i + mean over ALL of lambda_i, in the dtype of ``mean``.

    :source: Algorithm 1: w_{t+1} = (1/|S|) sum over S of y_i - h / alpha.
    """
    return (mean.double() + mean_dual).to(mean.dtype)
