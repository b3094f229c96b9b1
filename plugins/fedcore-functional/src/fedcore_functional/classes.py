"""Statistics of features by class: counts, sums, means and covariances; cross-entropy balanced by class counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import PluginConflictError, RunSetup
from fedcore_functional.arithmetic import matmul, membership


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's sum of features (C, d), at least float32, and its count (C,), int64.

    ``features`` (B, d) float, ``labels`` (B,) integer; labels outside 0..C-1 belong to no class. Differentiable in
    ``features``.

    The sums are a product with the one-hot labels. ``index_add_`` adds atomically on CUDA, in any order; the product
    repeats its bits on CPU and GPU, forwards and backwards. Its price: one non-finite feature spoils all classes.

    >>> class_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 0, 2]), 3)
    (tensor([[3.],
            [0.],
            [4.]]), tensor([2, 0, 1]))
    """
    members = membership(labels, num_classes)  # (B, C)
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    return matmul(members.to(features.dtype).mT, features), members.sum(0)  # (C, B) @ (B, d) -> (C, d)


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's mean feature (C, d), 0 where the class is absent, and its count (C,), int64.

    Arguments as in :func:`class_sums`. The counts are the mask: a mean whose count is 0 says nothing and must not enter
    an average.

    :source: FedProc, Eq. 5; FedECCR, Eq. 2; FedCD, Eq. 6 and FedCME, Eq. 9, of one batch.

    >>> class_means(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 0, 2]), 3)
    (tensor([[2., 3.],
            [0., 0.],
            [5., 6.]]), tensor([2, 0, 1]))
    """
    sums, counts = class_sums(features, labels, num_classes)
    return (sums / counts.clamp(min=1).to(sums.dtype).unsqueeze(1)).to(features.dtype), counts


def class_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each class's count (C,) int64, mean (C, d) and covariance (C, d, d), both float64.

    ``features`` (n, d) of any float dtype, ``labels`` (n,) in 0..C-1. Covariances have the denominator n_c - 1. They
    are 0 where n_c is 0 or 1; means are 0 where n_c is 0. No gradient.

    Not for use within a training step: it reads the counts on the host. So each sample is touched in its own class only
    (n d^2 operations instead of C n d^2).

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


def log_prior(counts: Tensor, gamma: float) -> Tensor:
    """Return gamma log n_c, minus infinity where the client has no sample of class c; all 0 if gamma is 0.

    ``counts`` n (C,) integer samples per class, ``gamma`` >= 0; the result is (C,) float32.

    >>> log_prior(torch.tensor([1, 0]), 2.0)
    tensor([0., -inf])
    >>> log_prior(torch.tensor([1, 0]), 0.0)
    tensor([0., 0.])
    """
    return (gamma * counts.double().log()).float() if gamma else torch.zeros_like(counts, dtype=torch.float32)


def balanced_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Return the balanced softmax loss: the mean of -log(n_y^gamma exp(g_y) / sum_c n_c^gamma exp(g_c)), shape ().

    ``logits`` g (B, C), ``labels`` y (B,), ``prior`` (C,) from :func:`log_prior`. A class without samples has
    probability and gradient 0; it must not be a label.

    :source: FedRoD (Chen, Chao, ICLR 2022, arXiv 2107.00778), its generic loss; FedETF (Li et al., ICCV 2023, arXiv
        2303.10058), its balanced feature loss, with the logits beta v_c^T mu.
    """
    return F.cross_entropy(logits + prior, labels)


def check_counts(counts: Tensor, samples: int, *, least: int = 0, complete: bool = False) -> None:
    """Refuse counts of a client's training samples that it cannot have.

    :param samples: the client's training samples, which the counts cannot exceed in sum; ``least`` the least count.
    :param complete: the counts have to add up to ``samples``.
    :raises ValueError: names the finding and the expectation.
    """
    numbers: list[int] = counts.flatten().tolist()  # Python's integers do not overflow in the sum
    if min(numbers, default=least) < least:
        raise ValueError(f"'counts' holds {min(numbers)}, expected no number below {least}")
    if sum(numbers) > samples or (complete and sum(numbers) != samples):
        most = "" if complete else "at most "
        raise ValueError(f"'counts' add up to {sum(numbers)}, expected {most}the client's {samples} training samples")


def refuse_changed_counts(setup: RunSetup, plugin: str) -> None:
    """Refuse a plugin that changes whatever a client sends (local-dp) next to one that needs exact class counts.

    For ``check_run`` of a plugin whose counts have to add up to the client's samples (:func:`check_counts`).

    :raises PluginConflictError: names both.
    """
    for other in setup.plugins.implementers("guard_upload"):
        reason = f"{other.name!r} changes all that clients send, but the class counts of {plugin!r} have to be exact"
        raise PluginConflictError.of(plugin, other.name, reason)
