"""Schemes that split a training set among clients, vectorised over the clients.

Each is a :class:`~fedcore.data.assign.Partitioner`; it reports deviations from the requested split as a
:class:`~fedcore.data.owners.PartitionWarning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.base.errors import ConfigError
from fedcore.base.seeding import numpy_generator
from fedcore.data.owners import (
    MIN_SIZE,
    IntArray,
    assign_by_counts,
    check_alpha,
    checked_labels,
    even_sizes,
    fill_up,
    index_lists,
    report,
)

MAX_REDRAWS = 1000
# The most (client, class) cells that are drawn: a few seconds of work for any number of clients.
_REDRAW_BUDGET = 20_000_000
_FEWEST_REDRAWS = 10


def iid(labels: IntArray, num_clients: int, *, seed: int, **_: Any) -> list[IntArray]:
    """Split at random into parts of equal size (to within one sample)."""
    labels = checked_labels(labels, num_clients)
    rng = numpy_generator(seed, "partition")
    sizes = even_sizes(len(labels), num_clients)
    return index_lists(assign_by_counts(sizes[None], np.zeros(len(labels), np.int64), rng), num_clients, rng)


def dirichlet(
    labels: IntArray, num_clients: int, *, alpha: float, seed: int, min_size: int = MIN_SIZE, **_: Any
) -> list[IntArray]:
    """Split every class by Dirichlet(alpha) proportions; see :func:`dirichlet_partition`."""
    return dirichlet_partition(labels, num_clients, alpha, seed=seed, min_size=min_size)


def dirichlet_partition(
    labels: IntArray, num_clients: int, alpha: float, *, seed: int, min_size: int = MIN_SIZE
) -> list[IntArray]:
    """Split every class by Dirichlet(alpha) proportions, as MOON and NIID-Bench do.

    ``labels`` (n,) integers; returns ``num_clients`` index arrays that together hold every sample once. A
    client that already holds the average n / num_clients gets no samples of the following classes (the capping
    mask), and the split is redrawn until every client has ``min_size`` samples. After at most ``MAX_REDRAWS`` draws
    (fewer when clients times classes is large) the best draw is used, and samples are moved from the largest clients
    to the smallest, which is reported as a :class:`PartitionWarning`.

    :raises ConfigError: no clients, more clients than samples, alpha not positive.
    """
    labels = checked_labels(labels, num_clients)
    check_alpha(alpha)
    rng = numpy_generator(seed, "partition")
    _, class_of, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    concentration = np.full(num_clients, alpha)
    return _redrawn_lists(
        f"dirichlet with alpha {alpha:g}",
        lambda: capped_counts(class_sizes, rng.dirichlet(concentration, size=len(class_sizes))),
        class_of.astype(np.int64),
        num_clients,
        min_size,
        rng,
    )


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


def shards(labels: IntArray, num_clients: int, *, seed: int, classes_per_client: int = 2, **_: Any) -> list[IntArray]:
    """Sort by label, cut into equal shards, assign ``classes_per_client`` shards to each client.

    Source: McMahan et al., AISTATS 2017 (two shards each). A shard may span two classes.
    """
    labels = checked_labels(labels, num_clients)
    _check_classes_per_client(classes_per_client)
    most = len(labels) // num_clients
    if classes_per_client > most:
        report(f"shards: {classes_per_client} shards per client lowered to {most}, one sample each")
    each = min(classes_per_client, most)
    rng = numpy_generator(seed, "partition")
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shard_owner = rng.permutation(num_clients * each) // each
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label] = np.repeat(shard_owner, even_sizes(len(labels), num_clients * each))
    return index_lists(owner, num_clients, rng)


def classes(labels: IntArray, num_clients: int, *, seed: int, classes_per_client: int = 2, **_: Any) -> list[IntArray]:
    """Give each client ``classes_per_client`` classes; the owners of a class share its samples evenly.

    As NIID-Bench's "#label": client j owns class j mod C and others at random. In addition, classes are reassigned so
    that every class has an owner if there are enough places; otherwise samples of classes without an owner stay
    unused, which is reported.

    :raises ConfigError: more classes per client than there are classes.
    """
    labels = checked_labels(labels, num_clients)
    _check_classes_per_client(classes_per_client)
    names, class_of, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if classes_per_client > len(names):
        raise ConfigError(
            f"classes_per_client is {classes_per_client}, but the data have {len(names)} classes: lower it"
        )
    rng = numpy_generator(seed, "partition")
    owns = _draw_ownership(num_clients, len(names), classes_per_client, rng)
    counts = np.zeros((len(names), num_clients), dtype=np.int64)
    for k, size in enumerate(class_sizes):
        # Owners in random order: otherwise the first ones would get all remainders.
        owners = rng.permutation(np.flatnonzero(owns[:, k]))
        if len(owners):
            counts[k, owners] = even_sizes(int(size), len(owners))
    unowned = np.flatnonzero(~owns.any(axis=0))
    owner = np.full(len(labels), -1, dtype=np.int64)
    used = ~np.isin(class_of, unowned)
    owner[used] = assign_by_counts(counts, class_of[used], rng)
    if len(unowned):
        report(
            f"classes: no client owns the classes {', '.join(str(c) for c in names[unowned])}; "
            f"{int((~used).sum())} samples stay unused"
        )
    moved = fill_up(owner, num_clients, 1, rng)
    if moved:
        report(f"classes: {moved} clients without samples got one sample of another class from the largest clients")
    return index_lists(owner, num_clients, rng)


def quantity(
    labels: IntArray, num_clients: int, *, alpha: float, seed: int, min_size: int = MIN_SIZE, **_: Any
) -> list[IntArray]:
    """Split at random into parts of Dirichlet(alpha) sizes, redrawn until every part has ``min_size`` samples.

    Source: NIID-Bench's "quantity skew"; redraws and corrections as in :func:`dirichlet_partition`.
    """
    labels = checked_labels(labels, num_clients)
    check_alpha(alpha)
    rng = numpy_generator(seed, "partition")
    concentration = np.full(num_clients, alpha)
    whole = np.array([len(labels)])
    return _redrawn_lists(
        f"quantity with alpha {alpha:g}",
        lambda: capped_counts(whole, rng.dirichlet(concentration, size=1)),
        np.zeros(len(labels), dtype=np.int64),
        num_clients,
        min_size,
        rng,
    )


def _redrawn_lists(
    what: str,
    draw: Callable[[], IntArray],
    class_of: IntArray,
    num_clients: int,
    min_size: int,
    rng: np.random.Generator,
) -> list[IntArray]:
    """Draw counts (C, N) until every client has ``min_size`` samples or the budget is spent; then assign samples."""
    possible = len(class_of) // num_clients
    if min_size > possible:
        report(
            f"{what}: {num_clients} clients with at least {min_size} samples each need more than "
            f"{len(class_of)} samples; the minimum was lowered to {possible}"
        )
    min_size = max(1, min(min_size, possible))
    best, fewest = _with_missing(draw(), min_size)
    draws = max(_FEWEST_REDRAWS, min(MAX_REDRAWS, _REDRAW_BUDGET // best.size))
    for _ in range(draws - 1):
        if not fewest:
            break
        best, fewest = min((best, fewest), _with_missing(draw(), min_size), key=lambda drawn: drawn[1])
    owner = assign_by_counts(best, class_of, rng)
    moved = fill_up(owner, num_clients, min_size, rng)
    if moved:
        report(
            f"{what}: none of {draws} draws gave all {num_clients} clients {min_size} samples; "
            f"{moved} samples of the largest clients were moved to the smallest"
        )
    return index_lists(owner, num_clients, rng)


def _with_missing(counts: IntArray, min_size: int) -> tuple[IntArray, int]:
    """Return ``counts`` (C, N) and the total of samples that clients lack to ``min_size``."""
    return counts, int(np.maximum(min_size - counts.sum(axis=0), 0).sum())


def _draw_ownership(num_clients: int, num_classes: int, each: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return the mask of owned classes, (N, C), ``each`` per client."""
    rank = rng.random((num_clients, num_classes), dtype=np.float32)
    rows = np.arange(num_clients)
    rank[rows, rows % num_classes] = -1
    owns = np.zeros(rank.shape, dtype=np.bool_)
    np.put_along_axis(owns, np.argpartition(rank, each - 1, axis=1)[:, :each], True, axis=1)
    owners = owns.sum(axis=0)
    for orphan in np.flatnonzero(owners == 0):
        common = int(np.argmax(owners))
        if owners[common] < 2:
            break
        client = rng.choice(np.flatnonzero(owns[:, common]))
        owns[client, common], owns[client, orphan] = False, True
        owners[common] -= 1
        owners[orphan] += 1
    return owns


def _check_classes_per_client(classes_per_client: int) -> None:
    if classes_per_client < 1:
        raise ConfigError(f"classes_per_client must be at least 1, not {classes_per_client}")
