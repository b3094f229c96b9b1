"""Equations 4, 5, 6 and 9 of FedCME: pure functions; those of the training step are capture-safe."""

from __future__ import annotations

import torch
from torch import Tensor


def evaluation_vector(logits: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the accuracy of each class, (C,) float64, 0 where the class is absent (Eq. 4).

    ``logits`` (n, C) of the final local model on the evaluation part, ``labels`` (n,).

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    >>> evaluation_vector(logits, torch.tensor([0, 1, 1]), 3)
    tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    counts = torch.bincount(labels, minlength=num_classes)
    hits = torch.bincount(labels[logits.argmax(dim=1) == labels], minlength=num_classes)
    return hits.double() / counts.clamp(min=1)


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return one batch's share of Eq. 5: sums of features (C, d), differentiable, and counts of samples (C,) int64.

    A product with the one-hot labels: it repeats its bits, where an indexed addition on CUDA does not. In float32 at
    least, under autocast too.

    >>> class_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 0, 2]), 3)
    (tensor([[3.],
            [0.],
            [4.]]), tensor([2, 0, 1]))
    """
    members = labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)  # (B, C)
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    with torch.autocast(device_type=features.device.type, enabled=False):
        return members.to(features.dtype).mT @ features, members.sum(dim=0)  # (C, B) @ (B, d) -> (C, d)


def local_features(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return a client's local features zeta_k (C, d) and which classes it holds (C,) (Eq. 5, Algorithm 2 line 18).

    ``sums`` (C, d) over all batches and epochs, ``counts`` (C,) of samples seen. Rows not held are 0.
    """
    return sums / counts.clamp(min=1).unsqueeze(1), counts > 0


def global_features(
    sums: Tensor, holders: Tensor, clients: int, memory: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next global features zeta (C, d) and which of them are known (C,) (Eq. 6).

    A client without a class brings the present global feature instead, if there is one; a class that has none
    yet is averaged over its holders alone, and stays unknown where no client holds it.

    :param sums: of the cohort's local features over the holders of each class, (C, d).
    :param holders: how many clients hold each class, (C,).
    :param clients: size of the cohort, as far as it was accepted.
    :param memory: present global features, (C, d); what stands in unknown rows does not matter.
    :param known: (C,) bool.
    """
    fill = torch.where(known, clients - holders, 0).unsqueeze(1)  # (C, 1)
    memory = torch.where(known.unsqueeze(1), memory, 0.0).to(sums.dtype)
    count = torch.where(known, clients, holders).clamp(min=1).unsqueeze(1)  # (C, 1)
    return (sums + fill * memory) / count, known | (holders > 0)


def alignment_loss(
    sums: Tensor, counts: Tensor, global_features: Tensor, known: Tensor, *, mean: bool = False
) -> Tensor:
    r"""Return :math:`\sum_c |\overline{z}_c - \zeta_c|^2` over the batch's classes with a known zeta_c (Eq. 9).

    ``sums`` (C, d) and ``counts`` (C,) of the batch as from :func:`class_sums`, ``global_features`` zeta (C, d),
    ``known`` (C,) bool (or counts, where 0 means unknown); the result has shape (). What stands in unknown rows, even
    NaN, does not matter.

    :param mean: take the mean over the features in place of their sum.

    >>> z, zeta = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 5.0]]), torch.zeros(3, 2)
    >>> sums, counts = class_sums(z, torch.tensor([0, 0, 2]), 3)
    >>> alignment_loss(sums, counts, zeta, torch.tensor([True, True, False]))  # |(2, 0)|^2
    tensor(4.)
    """
    known = known.bool()
    means = sums / counts.clamp(min=1).unsqueeze(1)  # (C, d)
    target = torch.where(known.unsqueeze(1), global_features, 0.0)
    squares = (means - target).square()  # (C, d)
    distances = squares.mean(dim=1) if mean else squares.sum(dim=1)  # (C,)
    return torch.where(known & (counts > 0), distances, 0.0).sum()
