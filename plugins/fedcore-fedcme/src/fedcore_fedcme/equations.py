"""Equations 4, 5, 6 and 9 of FedCME (Nie et al. 2023, arXiv 2307.08574), one pure function each.

The sums of Eq. 5 over one batch are :func:`fedcore_functional.class_sums`. The functions of the training step never
sync with the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore_functional import class_means


def evaluation_vector(logits: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return eps_k, the accuracy of each class, (C,) float64; 0 where the class is absent (Eq. 4).

    A sample whose largest logit is nan or infinite counts as wrong.

    :param logits: of the final local model on the evaluation part, (n, C).
    :param labels: of the same samples, (n,).

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    >>> evaluation_vector(logits, torch.tensor([0, 1, 1]), 3)
    tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    counts = torch.bincount(labels, minlength=num_classes)
    largest, predicted = logits.max(dim=1)
    hits = torch.bincount(labels[largest.isfinite() & (predicted == labels)], minlength=num_classes)
    return hits.double() / counts.clamp(min=1)


def local_features(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeta_k, a client's mean features (C, d), and the classes that it holds (C,) (Eq. 5, Algorithm 2 line 18).

    Rows of classes that the client does not hold are 0.

    :param sums: the sums of features over all batches and epochs, (C, d).
    :param counts: the numbers of these features, (C,).
    """
    return sums / counts.clamp(min=1).unsqueeze(1), counts > 0


def global_features(
    sums: Tensor, holders: Tensor, clients: int, memory: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Return zeta, the next global features (C, d), and the classes that have one (C,) (Eq. 6).

    A client without a class contributes the present global feature. A class without a global feature is averaged over
    its holders alone. It stays unknown if no client holds it.

    :param sums: the sum of local features over the holders of each class, (C, d).
    :param holders: the number of holders of each class, (C,).
    :param clients: the number of accepted clients.
    :param memory: the present global features, (C, d). The values in unknown rows do not matter.
    :param known: the classes that have a global feature, (C,) bool.
    """
    fill = torch.where(known, clients - holders, 0).unsqueeze(1)  # (C, 1)
    memory = torch.where(known.unsqueeze(1), memory, 0.0).to(sums.dtype)
    count = torch.where(known, clients, holders).clamp(min=1).unsqueeze(1)  # (C, 1)
    return (sums + fill * memory) / count, known | (holders > 0)


def alignment_loss(
    features: Tensor, labels: Tensor, global_features: Tensor, known: Tensor, *, mean: bool = False
) -> Tensor:
    r"""Return :math:`\sum_c |\overline{z}_c - \zeta_c|^2` over the batch's classes with a known zeta_c (Eq. 9).

    The result has shape (). The values in unknown rows of zeta do not matter, not even NaN.

    :param features: z, (B, d).
    :param labels: (B,).
    :param global_features: zeta, (C, d).
    :param known: the classes that have a global feature, (C,) bool.
    :param mean: take the mean over the features instead of their sum.

    >>> z, zeta = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 5.0]]), torch.zeros(3, 2)
    >>> alignment_loss(z, torch.tensor([0, 0, 2]), zeta, torch.tensor([True, True, False]))  # |(2, 0)|^2
    tensor(4.)
    """
    features = features.to(torch.promote_types(features.dtype, global_features.dtype))  # autocast gives 16 bits
    means, counts = class_means(features, labels, len(known))  # (C, d), (C,)
    target = torch.where(known.unsqueeze(1), global_features, 0.0)
    squares = (means - target).square()  # (C, d)
    distances = squares.mean(dim=1) if mean else squares.sum(dim=1)  # (C,)
    return torch.where(known & (counts > 0), distances, 0.0).sum()
