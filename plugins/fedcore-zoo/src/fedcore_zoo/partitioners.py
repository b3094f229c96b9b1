"""Splits by labels, by sizes and by the data's own sources: shards, classes, quantity, natural."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import ConfigError, numpy_generator
from fedcore.data import (
    MIN_SIZE,
    Dataset,
    IntArray,
    PartitionWarning,
    assign_by_counts,
    checked_labels,
    dirichlet,
    even_sizes,
    fill_up,
    parts_by_owner,
)

MAX_SOURCES = 3
"""The largest number of sources whose names a client has, joined by a plus."""


def shards(labels: IntArray, num_clients: int, *, seed: int, classes_per_client: int = 2, **_: Any) -> list[IntArray]:
    """Sort by label, cut into equal shards, assign ``classes_per_client`` shards to each client.

    Source: McMahan et al., AISTATS 2017 (two shards each). A shard may span several classes.
    """
    labels = checked_labels(labels, num_clients)
    most = len(labels) // num_clients
    if classes_per_client > most:
        _report(f"shards: {classes_per_client} shards per client lowered to {most}, one sample each")
    each = min(classes_per_client, most)
    rng = numpy_generator(seed, "partition")
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shard_owner = rng.permutation(num_clients * each) // each
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label] = np.repeat(shard_owner, even_sizes(len(labels), num_clients * each))
    return parts_by_owner(owner, num_clients, rng)


def classes(labels: IntArray, num_clients: int, *, seed: int, classes_per_client: int = 2, **_: Any) -> list[IntArray]:
    """Give each client ``classes_per_client`` classes; the owners of a class share its samples evenly.

    As NIID-Bench's "#label": client j owns class j mod C and others at random. In addition, classes are reassigned so
    that every class has an owner if there are enough places; otherwise samples of classes without an owner stay
    unused, which is reported.

    :raises ConfigError: more classes per client than there are classes.
    """
    labels = checked_labels(labels, num_clients)
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
        _report(
            f"classes: no client owns the classes {', '.join(str(c) for c in names[unowned])}; "
            f"{int((~used).sum())} samples stay unused"
        )
    moved = fill_up(owner, num_clients, 1, rng)
    if moved:
        _report(f"classes: {moved} clients without samples got one sample of another class from the largest clients")
    return parts_by_owner(owner, num_clients, rng)


def quantity(
    labels: IntArray, num_clients: int, *, alpha: float, seed: int, min_size: int = MIN_SIZE, **_: Any
) -> list[IntArray]:
    """Split at random into parts of Dirichlet(alpha) sizes, redrawn until every part has ``min_size`` samples.

    Source: NIID-Bench's "quantity skew"; redraws and corrections as in ``dirichlet``.
    """
    one_class = np.zeros_like(checked_labels(labels, num_clients))
    return dirichlet(one_class, num_clients, alpha=alpha, seed=seed, min_size=min_size)


def natural(
    labels: IntArray, num_clients: int, *, seed: int, dataset: Dataset, rows: IntArray, **_: Any
) -> list[IntArray] | dict[str, IntArray]:
    """Give each source's samples to one client; a source (``Dataset.sources``) is a writer or a hospital, for example.

    With as many clients as sources, client k is source k. Fewer clients hold several whole sources each: these are
    assigned in random order, one to each client in turn, so that clients hold as many sources to within one.

    :returns: The clients' positions; by the names of their sources, if these have names and nobody holds many.
    :raises ConfigError: the data set has no sources, or fewer than clients.
    """
    if dataset.sources is None:
        raise ConfigError(
            "--partition natural: this data set does not say where its samples come from; name its column, as in "
            "hf:FILE.csv?source=site (Dataset.sources of a loader), or another partition"
        )
    sources, source = np.unique(dataset.sources.cpu().numpy()[rows], return_inverse=True)
    if num_clients > len(sources):
        raise ConfigError(
            f"--clients is {num_clients}, but the samples come from {len(sources)} sources; write --clients "
            f"{len(sources)}, or fewer"
        )
    owner = np.arange(len(sources))
    if num_clients < len(sources):
        owner[numpy_generator(seed, "partition").permutation(len(sources))] = np.arange(len(sources)) % num_clients
    client = owner[source]
    order = np.argsort(client, kind="stable")
    parts = np.split(order, np.searchsorted(client[order], np.arange(1, num_clients)))
    if dataset.source_names is None or len(sources) > MAX_SOURCES * num_clients:
        return parts
    if len(dataset.source_names) <= sources[-1]:
        raise ConfigError(
            f"--partition natural: samples come from source {sources[-1]}, counted from 0, but {dataset.name!r} has "
            f"names of {len(dataset.source_names)} sources (Dataset.source_names)"
        )
    held = [
        [dataset.source_names[sources[k]] for k in np.flatnonzero(owner == number)] for number in range(num_clients)
    ]
    return {"+".join(names): part for names, part in zip(held, parts, strict=True)}


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


def _report(message: str) -> None:
    warnings.warn(message, PartitionWarning, stacklevel=3)
