"""Each sample's owner, and the clients' index lists made from it: what partitioners share."""

from __future__ import annotations

import warnings
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.base.errors import ConfigError

IntArray: TypeAlias = npt.NDArray[np.int64]

MIN_SIZE = 10
"""Samples that schemes with random sizes give every client at least, where there are enough."""


class PartitionWarning(UserWarning):
    """The data could not be split exactly as requested; the message states the deviation."""


def assign_by_counts(counts: IntArray, class_of: IntArray, rng: np.random.Generator) -> IntArray:
    """Return each sample's client, (n,): client j gets ``counts[k, j]`` random samples of class k."""
    shuffled = rng.permutation(len(class_of))
    by_class = shuffled[np.argsort(class_of[shuffled], kind="stable")]
    owner = np.empty(len(class_of), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(counts.shape[1]), counts.shape[0]), counts.ravel())
    return owner


def fill_up(owner: IntArray, num_clients: int, min_size: int, rng: np.random.Generator) -> int:
    """Move random samples, in place, from the largest clients until every client has ``min_size``.

    Every donor is reduced to one common level of at least ``min_size``. Returns the number of moved samples.
    """
    sizes = np.bincount(owner[owner >= 0], minlength=num_clients)
    missing = np.maximum(min_size - sizes, 0)
    needed = int(missing.sum())
    if not needed:
        return 0
    low, high = min_size, int(sizes.max())  # the highest level that frees enough samples lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= needed else (low, middle)
    give = np.maximum(sizes - low, 0)
    donors = np.flatnonzero(give)
    give[donors[: int(give.sum()) - needed]] -= 1
    shuffled = rng.permutation(np.flatnonzero(owner >= 0))
    by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.arange(len(by_owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = rng.permutation(by_owner[rank < np.repeat(give, sizes)])
    owner[moved] = np.repeat(np.arange(num_clients), missing)
    return needed


def index_lists(owner: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Return the positions that each client owns, in random order; samples with owner -1 are unused."""
    shuffled = rng.permutation(np.flatnonzero(owner >= 0))
    by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
    sizes = np.bincount(owner[shuffled], minlength=num_clients)
    return np.split(by_owner, np.cumsum(sizes)[:-1])


def even_sizes(total: int, parts: int) -> IntArray:
    """Return ``parts`` sizes that add up to ``total`` and differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def checked_labels(labels: npt.ArrayLike, num_clients: int) -> IntArray:
    """Return ``labels`` as int64 (n,).

    :raises ConfigError: they are not integers of shape (n,), or there are fewer than ``num_clients``.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"labels must be integers of shape (n,), not {array.dtype} of shape {array.shape}")
    if num_clients < 1:
        raise ConfigError(f"the number of clients must be at least 1, not {num_clients}")
    if num_clients > len(array):
        raise ConfigError(f"{num_clients} clients cannot each get one of {len(array)} samples: use fewer clients")
    return array.astype(np.int64, copy=False)


def check_alpha(alpha: float) -> None:
    """Refuse a concentration that is not positive or far too large.

    :raises ConfigError: the message names the alternative for equal parts.
    """
    # Far above any useful value; the gamma variates of the Dirichlet draw overflow near the end of the float range.
    if not 0 < alpha <= 1e12:
        raise ConfigError(f"alpha must be positive (and at most 1e12), not {alpha}; for equal parts use iid")


def report(message: str) -> None:
    """Issue a :class:`PartitionWarning` for the calling partitioner."""
    warnings.warn(message, PartitionWarning, stacklevel=3)
