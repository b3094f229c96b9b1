"""The server's arithmetic of Algorithm 2 (Reddi et al., ICLR 2021, arXiv 2003.00295), one function for each line.

All tensors have the shape of one parameter; delta is Delta_t, the mean movement of the clients in the round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_moment(delta: Tensor, previous: Tensor | None, beta1: float) -> Tensor:
    """Return m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t; None is m_{-1} = 0.

    >>> first_moment(torch.tensor([1.0]), torch.tensor([3.0]), 0.5)
    tensor([2.])
    """
    fresh = (1 - beta1) * delta
    return fresh if previous is None else beta1 * previous + fresh


def adagrad(delta: Tensor, previous: Tensor) -> Tensor:
    """Return FedAdagrad's v_t = v_{t-1} + Delta_t^2.

    >>> adagrad(torch.tensor([-3.0]), torch.tensor([4.0]))
    tensor([13.])
    """
    return previous + delta.square()


def yogi(delta: Tensor, previous: Tensor, beta2: float) -> Tensor:
    """Return FedYogi's v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2).

    >>> yogi(torch.tensor([-3.0, 1.0]), torch.tensor([4.0, 4.0]), 0.5)
    tensor([8.5000, 3.5000])
    """
    square = delta.square()
    return previous - (1 - beta2) * square * torch.sign(previous - square)


def adam(delta: Tensor, previous: Tensor, beta2: float) -> Tensor:
    """Return FedAdam's v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2.

    >>> adam(torch.tensor([-3.0]), torch.tensor([4.0]), 0.5)
    tensor([6.5000])
    """
    return beta2 * previous + (1 - beta2) * delta.square()


def server_update(first: Tensor, second: Tensor, lr: float, tau: float) -> Tensor:
    """Return x_{t+1} - x_t = eta m_t / (sqrt(v_t) + tau).

    >>> server_update(torch.tensor([2.0]), torch.tensor([9.0]), 0.5, 1.0)
    tensor([0.2500])
    """
    return lr * first / (second.sqrt() + tau)
