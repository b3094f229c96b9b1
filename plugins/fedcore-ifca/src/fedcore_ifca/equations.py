"""IFCA's estimate of the cluster (Ghosh et al., NeurIPS 2020, arXiv 2006.04088), and how its k models are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedcore import ClientUpdate, Tensors


def best_cluster(losses: Sequence[float]) -> int:
    """Return argmin_j F_i(theta_j), the first of equals (Algorithm 1).

    >>> best_cluster([0.7, 0.2, 0.2])
    1
    """
    return min(range(len(losses)), key=lambda j: losses[j])


def redrawn(tensor: Tensor, stream: torch.Generator) -> Tensor:
    """Return the tensor's values in a random order: another draw of the same initial distribution.

    >>> sorted(redrawn(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), torch.Generator()).flatten().tolist())
    [1.0, 2.0, 3.0, 4.0]
    """
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=stream)].view_as(tensor)


def mean_by_samples(tensors: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    """Return theta_j = sum_i n_i y_i / sum_i n_i, summed in float64; the largest of integers, such as counters.

    >>> mean_by_samples([torch.tensor([1.0]), torch.tensor([4.0])], [2, 1])
    tensor([2.])
    """
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(dim=0)
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, n in zip(tensors, samples):
        total.add_(tensor.double(), alpha=n)
    return (total / sum(samples)).to(tensors[0].dtype)


def cluster_mean(members: Sequence[ClientUpdate], names: Iterable[str]) -> Tensors:
    """Return theta_j by name, the mean of its members' models; empty without members."""
    samples = [update.samples for update in members]
    return {name: mean_by_samples([u.model[name] for u in members], samples) for name in names if members}
