"""FPL's clusters of prototypes (Huang et al., CVPR 2023), FINCH (Sarfraz et al., CVPR 2019), and the contrast."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore_functional import cosine_similarity_matrix


def first_neighbour_groups(points: Tensor) -> Tensor:
    """Return the group of each point, (n,) int64 from 0 on: points are linked to their nearest by cosine.

    A group is a connected component of these links. So two points with the same nearest point are in one group, as in
    FINCH's clustering equation. Groups are numbered in the order of their first points.

    ``points`` (n, d) of any float dtype.

    >>> first_neighbour_groups(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]]))
    tensor([0, 1, 0, 1])
    """
    similar = cosine_similarity_matrix(points.double(), points.double()).fill_diagonal_(-torch.inf)  # (n, n)
    group = list(range(len(points)))
    for point, nearest in enumerate(similar.argmax(dim=1).tolist()):
        first, second = sorted((group[point], group[nearest]))
        group = [first if number == second else number for number in group]
    numbers = {number: place for place, number in enumerate(dict.fromkeys(group))}
    return torch.tensor([numbers[number] for number in group])


def finch(points: Tensor) -> Tensor:
    """Return the cluster of each point, (n,) int64 from 0 on: the coarsest of FINCH's partitions.

    Each partition groups the means of the clusters before. The last one is taken that has more than one cluster and
    fewer than the one before; the first partition is taken in any case. After a step that merged a single cluster there
    is no further one.

    :source: FINCH (Sarfraz, Sharma, Stiefelhagen, CVPR 2019, arXiv 1902.11266), Algorithm 1, by its authors' code.

    >>> finch(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]]))
    tensor([0, 1, 0, 1])
    """
    clusters = first_neighbour_groups(points)
    merged = 2
    while merged > 1:
        coarser = first_neighbour_groups(cluster_means(points, clusters))[clusters]
        count = int(coarser.max()) + 1
        merged = int(clusters.max()) + 1 - count
        if count == 1 or merged < 1:
            break
        clusters = coarser
    return clusters


def cluster_means(points: Tensor, clusters: Tensor) -> Tensor:
    """Return the mean of each cluster's points, (n, d) -> (clusters, d), in float64.

    >>> cluster_means(torch.tensor([[1.0], [5.0], [3.0]]), torch.tensor([0, 1, 0]))
    tensor([[2.],
            [5.]], dtype=torch.float64)
    """
    return torch.stack([points[clusters == number].double().mean(0) for number in range(int(clusters.max()) + 1)])


def cluster_prototypes(prototypes: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cluster prototypes P (M, d) float32 and their classes (M,) int64, class by class.

    ``prototypes`` (K, C, d) of K clients, ``known`` (K, C) bool, the classes that each client holds. The prototypes of
    one class are clustered by :func:`finch`, and each cluster's mean is a cluster prototype. A class without a holder
    has none.
    """
    parts, classes = [prototypes.new_zeros(0, prototypes.shape[2]).double()], []
    for label in known.any(dim=0).nonzero().flatten().tolist():
        own = prototypes[known[:, label], label]  # (holders, d)
        means = cluster_means(own, finch(own))
        parts.append(means)
        classes += [label] * len(means)
    return torch.cat(parts).float(), torch.tensor(classes, dtype=torch.int64)


def cluster_contrast(
    features: Tensor, labels: Tensor, clusters: Tensor, classes: Tensor, *, temperature: float
) -> Tensor:
    r"""Return the mean of :math:`-\log(\sum_{p \in P^y} e^{\cos(z, p)/\tau} / \sum_{p \in P} e^{\cos(z, p)/\tau})`.

    ``features`` z (B, d), ``labels`` y (B,), ``clusters`` P (M, d) of the ``classes`` (M,), at least one; P^y are the
    ones of class y. A sample whose class has none contributes 0, but counts in the mean. It is capture-safe.

    >>> z, p = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> cluster_contrast(z, torch.tensor([0]), p, torch.tensor([0, 0, 1]), temperature=1.0)  # log((e + 2) / (e + 1))
    tensor(0.2382)
    """
    logits = cosine_similarity_matrix(features, clusters) / temperature  # (B, M)
    own = labels.unsqueeze(1) == classes  # (B, M)
    held = own.any(dim=1)
    # A row without own clusters takes all of them before it is dropped: a sum over none would give NaN in its gradient.
    positive = logits.masked_fill(~own & held.unsqueeze(1), -torch.inf).logsumexp(dim=1)  # (B,)
    return torch.where(held, logits.logsumexp(dim=1) - positive, 0.0).mean()
