"""How FedPAC combines the clients' heads (Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore_functional import class_means

LEAST_SHARE = 1e-3
"""Smaller shares are set to 0, as in the authors' code."""


def head_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return V_i () and h_i (C, d), both float64: variance and class means of a client's features (n, d).

    h_{i,c} = p_c mu_c and V_i = (sum_c p_c E[|z|^2 | c] - p_c^2 |mu_c|^2) / n, with the client's class shares p_c and
    the mean feature mu_c of class c.

    >>> variance, means = head_statistics(torch.tensor([[1.0], [3.0], [4.0], [4.0]]), torch.tensor([0, 0, 1, 1]), 3)
    >>> variance, means.flatten()  # (1/2 * 5 - 1/4 * 4 + 1/2 * 16 - 1/4 * 16) / 4
    (tensor(1.3750, dtype=torch.float64), tensor([1., 2., 0.], dtype=torch.float64))
    """
    means, counts = class_means(features.double(), labels, num_classes)
    means = means * (counts.double() / len(labels)).unsqueeze(1)  # (C, d)
    return (features.double().square().sum() / len(labels) - means.square().sum()) / len(labels), means


def objective(variances: Tensor, means: Tensor, client: int) -> Tensor:
    """Return P (K, K) of client i's quadratic programme: P_jk = [j = k] V_j + sum_c <h_i - h_j, h_i - h_k>.

    ``variances`` V (K,), ``means`` h (K, C, d). alpha^T P alpha is the variance of the combined head's features plus
    the squared bias sum_c |h_i - sum_j alpha_j h_j|^2.

    >>> objective(torch.tensor([1.0, 2.0]), torch.tensor([[[0.0]], [[3.0]]]), 0)
    tensor([[ 1.,  0.],
            [ 0., 11.]])
    """
    apart = (means[client] - means).flatten(1)  # (K, C d)
    return torch.diag(variances) + apart @ apart.T


def least_quadratic(matrix: Tensor) -> Tensor:
    """Return the alpha >= 0 with sum 1 that minimises alpha^T P alpha, (K,) float64; P (K, K) positive semidefinite.

    It is an active-set method. On the support the minimum solves P alpha = const, and the coordinate with the smallest
    gradient joins until no gradient is smaller than on the support. A step that would leave the simplex stops at its
    border, and drops the coordinate that is 0 there.

    >>> least_quadratic(torch.diag(torch.tensor([1.0, 3.0])))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    >>> least_quadratic(torch.tensor([[1.0, 2.0], [2.0, 9.0]]))
    tensor([1., 0.], dtype=torch.float64)
    """
    matrix = matrix.double()
    support = [int(matrix.diagonal().argmin())]
    alpha = torch.zeros(len(matrix), dtype=torch.float64)
    alpha[support] = 1.0
    slack = 1e-10 * float(matrix.diagonal().max().clamp(min=1e-300))
    for _ in range(20 * len(matrix)):  # a bound for ties that rounding does not break
        gradient = matrix @ alpha
        joining = int(gradient.argmin())
        if gradient[joining] >= alpha @ gradient - slack:
            break
        support = sorted({*support, joining})
        while True:
            target = torch.zeros_like(alpha)
            target[support] = _affine_minimum(matrix[support][:, support])
            if bool((target[support] > 0).all()):
                alpha = target
                break
            leaving = [j for j in support if target[j] <= 0]
            steps = [float(alpha[j] / (alpha[j] - target[j])) if alpha[j] > 0 else 0.0 for j in leaving]
            alpha = alpha + min(steps) * (target - alpha)
            dropped = leaving[steps.index(min(steps))]
            alpha[dropped] = 0.0
            support.remove(dropped)
    return alpha


def combination(variances: Tensor, means: Tensor, client: int) -> Tensor:
    """Return alpha_i (K,) float64 of client i: the minimum, without shares below 0.001, and with sum 1 again.

    Arguments as in :func:`objective`.
    """
    alpha = least_quadratic(objective(variances, means, client))
    alpha = torch.where(alpha > LEAST_SHARE, alpha, 0.0)
    return alpha / alpha.sum()


def _affine_minimum(matrix: Tensor) -> Tensor:
    """Return the minimum of alpha^T P alpha with sum 1 and signs free: P alpha = const 1."""
    size = len(matrix)
    system = torch.ones(size + 1, size + 1, dtype=torch.float64)
    system[:size, :size] = matrix
    system[size, size] = 0.0
    right = torch.zeros(size + 1, dtype=torch.float64)
    right[size] = 1.0
    solution: Tensor = torch.linalg.pinv(system, hermitian=True) @ right
    return solution[:size]
