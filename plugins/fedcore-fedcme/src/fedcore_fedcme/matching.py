"""Which clients exchange with each other (FedCME, section IV-A and Make-Matching of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcore_functional import cosine_similarity_matrix


def match_clients(vectors: Mapping[int, Tensor]) -> dict[int, int]:
    """Pair the clients of a cohort by their evaluation vectors (C,) (Algorithm 1, lines 11 to 24).

    Clients are ordered by their cosine with the cohort's mean vector, least first. The first takes the remaining client
    whose cosine with it is least, and both leave. Ties go to the smaller id. In an odd cohort the last client stays
    alone. Cosines are float64, and rounded to 9 decimals before they are compared. A zero vector has cosine 0 with
    everything.

    :returns: each client's counterpart; a client that stays alone is absent.

    >>> match_clients({3: torch.tensor([1.0, 0.0]), 5: torch.tensor([0.0, 1.0]), 9: torch.tensor([1.0, 0.1])})
    {5: 3, 3: 5}
    """
    ids, to_mean, between = _cosines(vectors)
    queue = sorted(range(len(ids)), key=lambda k: (to_mean[k], k))
    pairs: dict[int, int] = {}
    while len(queue) > 1:
        first = queue.pop(0)
        partner = min(queue, key=lambda j: (between[first][j], j))
        queue.remove(partner)
        pairs[ids[first]], pairs[ids[partner]] = ids[partner], ids[first]
    return pairs


def match_many_to_one(vectors: Mapping[int, Tensor]) -> dict[int, int]:
    """Return for each client the client whose cosine with it is least (FedCME-MTO). Several clients can share one.

    Ties go to the smaller id. The only client of a cohort is absent.

    >>> match_many_to_one({3: torch.tensor([1.0, 0.0]), 5: torch.tensor([0.0, 1.0]), 9: torch.tensor([1.0, 0.1])})
    {3: 5, 5: 3, 9: 5}
    """
    ids, _, between = _cosines(vectors)
    donors: dict[int, int] = {}
    for k, client in enumerate(ids):
        others = [j for j in range(len(ids)) if j != k]
        if others:
            donors[client] = ids[min(others, key=lambda j: (between[k][j], j))]
    return donors


def _cosines(vectors: Mapping[int, Tensor]) -> tuple[list[int], list[float], list[list[float]]]:
    """Return the ids in ascending order, their cosines with the mean (K,) and with each other (K, K)."""
    ids = sorted(vectors)
    if not ids:
        return [], [], []
    stacked = torch.stack([vectors[client].detach().cpu().double() for client in ids])  # (K, C)
    mean = stacked.mean(dim=0, keepdim=True)  # (1, C)
    to_mean = cosine_similarity_matrix(stacked, mean).squeeze(1)  # (K,)
    between = cosine_similarity_matrix(stacked, stacked)  # (K, K)
    return ids, to_mean.round(decimals=9).tolist(), between.round(decimals=9).tolist()
