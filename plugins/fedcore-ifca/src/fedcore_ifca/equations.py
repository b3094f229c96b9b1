"""IFCA's estimate of the cluster (Ghosh et al., NeurIPS 2020, arXiv 2006.04088), and how its k models are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def best_clusters(losses: Sequence[float]) -> list[int]:
    """Return argmin_j F_i(theta_j) (Algorithm 1), all of equals; nan is above all, and 0 if all are nan.

    >>> best_clusters([0.7, 0.2, 0.2])
    [1, 2]
    """
    least = min((loss for loss in losses if not math.isnan(loss)), default=None)
    return [j for j, loss in enumerate(losses) if loss == least] or [0]


def redrawn(tensor: Tensor, stream: torch.Generator) -> Tensor:
    """Return the tensor's values in a random order: another draw of the same initial distribution.

    >>> sorted(redrawn(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), torch.Generator()).flatten().tolist())
    [1.0, 2.0, 3.0, 4.0]
    """
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=stream)].view_as(tensor)
