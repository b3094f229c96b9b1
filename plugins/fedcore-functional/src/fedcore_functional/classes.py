"""Statistics of features by class: counts, means and covariances."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore_functional.arithmetic import matmul, membership


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's mean feature (C, d), 0 where the class is absent, and its count (C,), int64.

    ``features`` (B, d) float, ``labels`` (B,) integer; labels outside 0..C-1 belong to no class. The counts
    are the mask: a mean whose count is 0 says nothing and must not enter an average. Differentiable in
    ``features``.

    The sums are a product with the one-hot labels, not ``index_add_``: that adds atomically, in any order, on
    CUDA, while this repeats its bits on CPU and GPU, forwards and backwards. (Its price: one non-finite
    feature spoils all classes.)

    :source: FedProc, Eq. 5; FedECCR, Eq. 2.

    >>> class_means(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 0, 2]), 3)
    (tensor([[2., 3.],
            [0., 0.],
            [5., 6.]]), tensor([2, 0, 1]))
    """
    members = membership(labels, num_classes)  # (B, C)
    counts = members.sum(0)  # (C,)
    sums = matmul(members.to(features.dtype).mT, features)  # (C, B) @ (B, d) -> (C, d)
    return sums / counts.clamp(min=1).to(features.dtype).unsqueeze(1), counts


def class_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each class's count (C,) int64, mean (C, d) and covariance (C, d, d), both float64.

    ``features`` (n, d) of any float dtype, ``labels`` (n,) in 0..C-1. Covariances have the denominator
    n_c - 1 and are 0 where n_c is 0 or 1; means are 0 where n_c is 0. No gradient.

    Not for use within a training step: it reads the counts on the host, so as to touch each sample only in
    its own class (n d^2 operations instead of C n d^2).

    :raises ValueError: a label lies outside 0..C-1.
    :source: FedECCR, Eqs. 4, 5; CCVR (Luo et al., NeurIPS 2021, arXiv 2106.05001).

    >>> features, labels = torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1])
    >>> counts, means, covariances = class_statistics(features, labels, 2)
    >>> counts.tolist(), means.tolist(), covariances.tolist()
    ([2, 1], [[1.0], [4.0]], [[[2.0]], [[0.0]]])
    """
    order = labels.argsort(stable=True)
    features = features.detach()[order].double()  # (n, d), class by class
    counts = membership(labels, num_classes).sum(0)  # (C,)
    sizes: list[int] = counts.tolist()
    if sum(sizes) != len(labels):
        raise ValueError(f"labels must lie in 0..{num_classes - 1}, got {labels.min()}..{labels.max()}")
    d = features.shape[1]
    means = features.new_zeros(num_classes, d)
    covariances = features.new_zeros(num_classes, d, d)
    for label, members in enumerate(torch.split(features, sizes)):  # members (n_c, d)
        if len(members) > 0:
            means[label] = members.mean(0)
        if len(members) > 1:
            centred = members - means[label]
            covariances[label] = centred.mT @ centred / (len(members) - 1)
    return counts, means, covariances
