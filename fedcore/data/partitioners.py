"""Schemes that split a training set among clients, vectorised over the clients, and the steps they share.

Each scheme is a :class:`~fedcore.data.Partitioner`. It reports deviations from the requested split as a
:class:`PartitionWarning`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.base.errors import ConfigError
from fedcore.base.seeding import numpy_generator

IntArray: TypeAlias = npt.NDArray[np.int64]

MIN_SIZE = 10
"""Schemes with random sizes give every client at least this many samples, where there are enough."""
MAX_REDRAWS = 1000
# Redraws end after so many (client, class) cells, a few seconds of work, but not before the fewest draws.
_REDRAW_BUDGET = 20_000_000
_FEWEST_REDRAWS = 10


class PartitionWarning(UserWarning):
    """The data could not be split exactly as requested; the message states the deviation."""


def iid(labels: IntArray, num_clients: int, *, seed: int, **_: Any) -> list[IntArray]:
    """Split at random into parts of equal size (to within one sample)."""
    labels = checked_labels(labels, num_clients)
    rng = numpy_generator(seed, "partition")
    sizes = even_sizes(len(labels), num_clients)
    return parts_by_owner(assign_by_counts(sizes[None], np.zeros(len(labels), np.int64), rng), num_clients, rng)


def dirichlet(
    labels: IntArray, num_clients: int, *, alpha: float, seed: int, min_size: int = MIN_SIZE, **_: Any
) -> list[IntArray]:
    """Split every class by Dirichlet(alpha) proportions, as MOON and NIID-Bench do.

    ``labels`` are (n,) integers. The ``num_clients`` index arrays together hold every sample once. A client that
    already holds the average n / num_clients gets no samples of the following classes (the capping mask). The split is
    redrawn until every client has ``min_size`` samples. After at most ``MAX_REDRAWS`` draws (fewer if clients times
    classes is large) the best draw is used. Samples are then moved from the largest clients to the smallest, and a
    :class:`PartitionWarning` reports it.

    :raises ConfigError: no clients, more clients than samples, alpha not positive.
    """
    labels = checked_labels(labels, num_clients)
    check_alpha(alpha)
    rng = numpy_generator(seed, "partition")
    class_of, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    possible = len(labels) // num_clients
    if min_size > possible:
        warnings.warn(
            f"Dirichlet({alpha:g}): {num_clients} clients with at least {min_size} samples each need more than "
            f"{len(labels)} samples; the minimum was lowered to {possible}",
            PartitionWarning,
            stacklevel=2,
        )
    least = max(1, min(min_size, possible))
    concentration = np.full(num_clients, alpha)

    def draw() -> tuple[int, IntArray]:
        """Return how many samples the clients lack, and the counts (C, N)."""
        counts = capped_counts(class_sizes, rng.dirichlet(concentration, size=len(class_sizes)))
        return int(np.maximum(least - counts.sum(axis=0), 0).sum()), counts

    draws = max(_FEWEST_REDRAWS, min(MAX_REDRAWS, _REDRAW_BUDGET // (len(class_sizes) * num_clients)))
    lacking, counts = draw()
    for _redraw in range(draws - 1):
        if not lacking:
            break
        lacking, counts = min((lacking, counts), draw(), key=lambda drawn: drawn[0])
    owner = assign_by_counts(counts, class_of, rng)
    moved = fill_up(owner, num_clients, least, rng)
    if moved:
        warnings.warn(
            f"Dirichlet({alpha:g}): none of {draws} draws gave all {num_clients} clients {least} samples; "
            f"{moved} samples of the largest clients were moved to the smallest",
            PartitionWarning,
            stacklevel=2,
        )
    return parts_by_owner(owner, num_clients, rng)


def capped_counts(class_sizes: IntArray, draws: npt.NDArray[np.float64]) -> IntArray:
    """Return how many samples of each class each client gets, (C, N), for drawn proportions (C, N).

    One pass of MOON's scheme, class by class in the given order: the proportions of clients that hold the average or
    more are set to zero, the others are renormalised and cut at the floor of the cumulated proportions.
    """
    num_clients = draws.shape[1]
    total = int(class_sizes.sum())
    counts = np.zeros(draws.shape, dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    for k, size in enumerate(class_sizes):
        below_average = held * num_clients < total
        share = np.where(below_average, draws[k], 0.0)
        mass = share.sum()
        if not 0 < mass < math.inf:
            # A tiny alpha puts all weight on one client. If that one is capped, the other weights have underflowed
            # to 0 and dividing by their sum would give NaN. The class still goes to one client.
            share = np.zeros(num_clients)
            share[np.argmin(np.where(below_average, held, total + 1))] = mass = 1.0
        cuts = np.minimum(np.floor(np.cumsum(share / mass) * size), size).astype(np.int64)[:-1]
        counts[k] = np.diff(cuts, prepend=0, append=size)
        held += counts[k]
    return counts


def assign_by_counts(counts: IntArray, class_of: IntArray, rng: np.random.Generator) -> IntArray:
    """Return each sample's client, (n,): client j gets ``counts[k, j]`` random samples of class k."""
    shuffled = rng.permutation(len(class_of))
    by_class = shuffled[np.argsort(class_of[shuffled], kind="stable")]
    owner = np.empty(len(class_of), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(counts.shape[1]), counts.shape[0]), counts.ravel())
    return owner


def fill_up(owner: IntArray, num_clients: int, min_size: int, rng: np.random.Generator) -> int:
    """Move random samples, in place, from the largest clients until every client has ``min_size``.

    Donors are reduced to one level of at least ``min_size``, to within one. Returns the number of moved samples.
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


def parts_by_owner(owner: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Return the positions that each client owns, in random order; samples with owner -1 are unused."""
    shuffled = rng.permutation(np.flatnonzero(owner >= 0))
    by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
    return np.split(by_owner, np.bincount(owner[shuffled], minlength=num_clients).cumsum()[:-1])


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
