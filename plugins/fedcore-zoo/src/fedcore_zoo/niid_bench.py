"""The Dirichlet split of NIID-Bench's and MOON's public code, number for number."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcore import ConfigError
from fedcore.data import MIN_SIZE, IntArray, capped_counts, check_alpha, checked_labels

MAX_REDRAWS = 1000


def niid_bench(
    labels: IntArray, num_clients: int, *, alpha: float, seed: int, min_size: int = MIN_SIZE, **_: Any
) -> list[IntArray]:
    """Split as ``dirichlet`` does, with the numbers that the public code draws for ``init_seed`` = ``seed``.

    MOON's code, and many that build on it, split CIFAR-10 and CIFAR-100 so. Where that code would draw without end, the
    split is refused.

    :raises ConfigError: no clients, more clients than samples, alpha not positive, a seed that NumPy's legacy generator
        does not take, or no draw of ``MAX_REDRAWS`` with ``min_size`` samples for every client.
    :source: Li et al., ICDE 2022, arXiv 2102.02079: ``noniid-labeldir`` of its code; ``noniid`` of MOON's.
    """
    labels = checked_labels(labels, num_clients)
    check_alpha(alpha)
    if seed >= 1 << 32:
        raise ConfigError(f"niid-bench draws with NumPy's legacy generator, whose seeds are below 2^32, not {seed}")
    rng = np.random.RandomState(seed)
    concentration = np.full(num_clients, alpha)
    members = [np.flatnonzero(labels == k) for k in range(int(labels.max()) + 1)]
    sizes = np.array([len(positions) for positions in members])
    for _draw in range(MAX_REDRAWS):
        shuffled, draws = zip(*((rng.permutation(positions), rng.dirichlet(concentration)) for positions in members))
        counts = capped_counts(sizes, np.stack(draws))
        if counts.sum(axis=0).min() >= min_size:
            break
    else:
        raise ConfigError(
            f"niid-bench: none of {MAX_REDRAWS} draws with alpha {alpha:g} gave all {num_clients} clients {min_size} "
            f"samples; --partition dirichlet moves samples to the smallest clients then"
        )
    pieces = [np.split(positions, np.cumsum(of_class)[:-1]) for positions, of_class in zip(shuffled, counts)]
    return [rng.permutation(np.concatenate(of_client)) for of_client in zip(*pieces)]
