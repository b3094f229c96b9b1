"""FedNova's numbers (Wang et al. 2020): how much work a client did, and the step that the server takes from it."""

from __future__ import annotations

import torch
from torch import Tensor


def local_norm(steps: int, momentum: float = 0.0, shrinkage: float = 0.0) -> float:
    r"""Return :math:`\|a_i\|_1`, the local work of one client.

    The gradient of local step k moves the weights by :math:`-\eta a_{i,k}` until the end of the round: a_{i,k} is the
    response of PyTorch's SGD to one impulse, K - k steps later.

    :param steps: K_i; ``momentum`` rho; ``shrinkage`` eta * mu of a proximal term in the loss.
    :returns: K without the two; A(K) of ``effective_steps`` with momentum; [1 - (1 - eta mu)^K] / (eta mu) with the
        proximal term alone. At least 1 for K >= 1, as a_{i,K} = 1.

    >>> local_norm(3), round(local_norm(3, 0.9), 12), local_norm(2, 0.0, 0.5)
    (3.0, 5.61, 1.5)
    """
    velocity = response = 1.0
    norm = 0.0
    for _ in range(steps):
        norm += abs(response)
        velocity = momentum * velocity - shrinkage * response
        response += velocity
    return norm


def step_factor(samples: float, work: float, inverse: float) -> float:
    r"""Return :math:`\tau_{eff} \sum_i p_i / \|a_i\|_1`, the share of the way to the reweighted mean.

    :param samples: sum of n_i; ``work`` sum of n_i tau_i, tau_i being ``\|a_i\|_1`` or K_i; ``inverse`` sum of
        n_i / ``\|a_i\|_1``. A common unit of work cancels.

    >>> step_factor(4, 1 * 2 + 3 * 1, 1 / 2 + 3 / 1)  # tau_eff 1.25
    1.09375
    """
    return (work / samples) * (inverse / samples)


def normalised_step(current: Tensor, mean: Tensor, factor: float) -> Tensor:
    r"""Return :math:`w_t - \tau_{eff} \sum_i p_i d_i` with :math:`d_i = (w_t - y_i) / \|a_i\|_1`, in w_t's shape.

    ``mean`` is the mean of the y_i with weights n_i / ``\|a_i\|_1``, so that the sum is a multiple of w_t - mean.

    >>> normalised_step(torch.zeros(2), torch.tensor([1.5, 12.0]) / 7, 1.09375)
    tensor([0.2344, 1.8750])
    """
    return torch.lerp(current, mean, factor)
