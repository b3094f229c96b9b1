"""FedDC's equations (Gao et al., CVPR 2022, arXiv 2203.11751), one function each."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore.functional import effective_steps


def drift_target(start: Tensor, drift: Tensor | None) -> Tensor:
    """Return w_t - h_i, where the local model should stand so that the drift corrects it to w_t.

    :param start: w_t; ``drift`` h_i, None before the client's first participation, where it is 0.
    :source: the penalty R_i = |h_i + w - w_t|^2.
    """
    return start.clone() if drift is None else start - drift


def client_weight(samples: int, mean_samples: float | None) -> float:
    """Return W_i = n_i / mean n over all clients; 1 where all clients count the same (``mean_samples`` is None).

    With alpha / W_i, s / W_i and s the mean of W_i s_i a fixed point has sum of n_i grad F_i = 0, without W_i sum of
    grad F_i = 0.

    :source: the authors' code.
    """
    return 1.0 if mean_samples is None else samples / mean_samples


def gradient_gap(like: Tensor, gradient: Tensor | None, own: Tensor | None, weight: float = 1.0) -> Tensor:
    """Return s / W_i - s_i, what the term G_i adds to every gradient, laid out in memory like the parameter ``like``.

    :param gradient: s; ``own`` s_i; None is 0, before the first round and the first participation.
    :param weight: W_i.
    :source: the gradient correction G_i, of the code's recursion.
    """
    result = torch.zeros_like(like)
    if gradient is not None:
        result.add_(gradient, alpha=1 / weight)
    return result if own is None else result.sub_(own)


def renewed_drift(drift: Tensor | None, start: Tensor, trained: Tensor) -> Tensor:
    """Return h_i + (y_i - w_t).

    :source: Algorithm 1, h_i <- h_i + (y_i - w_t).
    """
    return trained - start if drift is None else drift + (trained - start)


def renewed_gradient(
    start: Tensor, trained: Tensor, gap: Tensor | None, *, lr: float, steps: int, momentum: float
) -> Tensor:
    """Return s_i - s / W_i + (w_t - y_i) / (eta A(K_i)), the client's mean gradient over its local training.

    :param gap: s / W_i - s_i; None is 0.
    :param lr: eta of this round; ``steps`` K_i that were executed; ``momentum`` rho of local SGD.
    :source: the code's recursion, which is SCAFFOLD's Option II (Karimireddy et al., ICML 2020, Eq. 4), with the
        effective number of steps A(K) for K, so that s_i stays one gradient under momentum.
    """
    gradient = (start - trained) / (lr * effective_steps(steps, momentum))
    return gradient if gap is None else gradient - gap


def renewed_mean_drift(mean_drift: Tensor, start: Tensor, mean: Tensor, share: float) -> Tensor:
    """Return the mean of h_i over ALL clients after a round, float64.

    :param mean_drift: that mean before the round, float64.
    :param mean: the plain mean of y_i over the clients that took part; ``share`` their number by that of all.
    """
    return mean_drift + share * (mean.double() - start.double())


def corrected_mean(mean: Tensor, mean_drift: Tensor) -> Tensor:
    """Return w_{t+1} = mean over S of y_i + mean over ALL of h_i, in the dtype of ``mean``.

    :source: the code; the paper writes the mean of y_i + h_i.
    """
    return (mean.double() + mean_drift).to(mean.dtype)
