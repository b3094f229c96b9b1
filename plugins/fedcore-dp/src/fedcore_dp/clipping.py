"""Clipping several tensors as one vector: pure functions, sums in float64."""

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
    r"""Return :math:`\min(1, S / \|\Delta\|)`, what a vector of this norm is multiplied by.

    :source: McMahan, Ramage, Talwar, Zhang, ICLR 2018, arXiv 1710.06963, FlatClip.

    >>> clip_factor(2.0, 4.0), clip_factor(8.0, 4.0), clip_factor(0.0, 4.0)
    (1.0, 0.5, 1.0)
    """
    return 1.0 if norm <= bound else bound / norm
