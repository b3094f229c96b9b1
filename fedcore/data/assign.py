"""Assign a data set's training samples: to the public, to clients by a partitioner, and to each client's hold-out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.config import RunConfig, public_share
from fedcore.base.errors import ConfigError, DataError, PluginContractError
from fedcore.base.registry import call, resolve
from fedcore.base.seeding import derive_seed, numpy_generator, random_stream
from fedcore.data.dataset import Dataset, PublicSamples
from fedcore.data.loading import load_dataset
from fedcore.data.partition import IndexLists, Partition, labels_sha256, problem_with
from fedcore.data.partitioners import MIN_SIZE, IntArray, PartitionWarning
from fedcore.data.samples import JSON, TensorSamples


class Partitioner(Protocol):
    """Divide samples among clients; an entry point of the group ``fedcore.partitioners``.

    A scheme names the arguments that it needs and takes the others as ``**_``. With the attribute
    ``shares_samples = True`` it may assign one sample to several clients.

    :param labels: classes of the samples to assign, (n,) int64.
    :param dataset: the run's data set.
    :param rows: the position of each sample in ``dataset.train``, (n,) int64, ascending. With ``--samples``,
        ``--imbalance``, ``--unseen-domain`` or a share as ``--public`` some positions are missing. The model's inputs
        are ``dataset.train.gather(torch.from_numpy(rows))``.
    :returns: One array of positions in ``labels`` per client: disjoint, not empty, in any order, the same for the
        same arguments. For millions of clients return an :class:`~fedcore.data.IndexLists`.
    """

    def __call__(
        self,
        labels: IntArray,
        num_clients: int,
        *,
        alpha: float,
        seed: int,
        min_size: int = MIN_SIZE,
        classes_per_client: int = 2,
        dataset: Dataset,
        rows: IntArray,
    ) -> Sequence[Any]:
        """Return each client's positions."""
        ...


def make_partition(dataset: Dataset, config: RunConfig) -> Partition:
    """Split the training set of ``dataset`` among clients and separate each client's hold-out.

    The hold-out is ``client_test_fraction`` of the client's samples, drawn class by class. The last sample of a class
    stays in training, so every client keeps some.

    :param config: its options for partitions and its seed count: ``RunConfig(partition="dirichlet", clients=20)``.
    :returns: The partition. Its ``info["notes"]`` has the warnings of the partitioner.
    :raises UnknownNameError: no installed package provides the partitioner.
    :raises ConfigError: the numbers contradict each other or the data.
    :raises PluginContractError: the partitioner raised, or returned something other than disjoint, non-empty parts.
    """
    labels = dataset.train.labels.cpu().numpy()
    public = public_rows(dataset.train.labels, config.public, config.seed)
    rows = _rows(dataset, labels, public, config)
    options: dict[str, JSON] = {
        "alpha": config.alpha,
        "classes_per_client": config.classes_per_client,
        "seed": config.seed,
    }
    train, notes, shared = _divide(dataset, labels, rows, config, options)
    test = IndexLists.empty(len(train))
    if config.client_test_fraction and shared:
        raise ConfigError(
            f"client_test_fraction must be 0: {config.partition!r} may assign a held-out sample to another client too"
        )
    if config.client_test_fraction:
        train, test = _hold_out(train, labels, config.client_test_fraction, config.seed)
    info: dict[str, JSON] = {
        "dataset": dataset.name,
        "labels_sha256": labels_sha256(dataset),
        "partitioner": config.partition,
        **options,
        "client_test_fraction": config.client_test_fraction,
        "notes": [*notes],
    }
    if shared:
        info["shares_samples"] = True
    if config.samples is not None:
        info["samples"] = len(rows)
    if config.imbalance > 1:
        info["imbalance"] = config.imbalance
    if len(public):
        info["public"] = len(public)
    if config.unseen_domain is not None:
        info["unseen_domain"] = config.unseen_domain
    return with_unseen(Partition(train, test, info), config.unseen_clients, config.seed)


def _rows(dataset: Dataset, labels: IntArray, public: Tensor, config: RunConfig) -> IntArray:
    """Return the positions of the training samples to assign, ascending."""
    rows = np.setdiff1d(np.arange(len(labels)), public.numpy())
    if config.unseen_domain is not None:
        rows = np.setdiff1d(rows, domain_rows(dataset, config.unseen_domain).numpy())
    rows = rows[_long_tailed(labels[rows], dataset.num_classes, config.imbalance, config.seed)]
    return rows[_drawn(labels[rows], config.samples, config.seed)]


def _divide(
    dataset: Dataset, labels: IntArray, rows: IntArray, config: RunConfig, options: Mapping[str, Any]
) -> tuple[IndexLists, list[str], bool]:
    """Let the partitioner divide the samples at ``rows``.

    :returns: Each client's positions in the training set, the partitioner's notes, and whether clients may share
        samples.
    """
    partitioner = resolve("partitioner", config.partition)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PartitionWarning)
        how = {**options, "min_size": MIN_SIZE, "dataset": dataset, "rows": rows}
        with random_stream(derive_seed(config.seed, "partitioner")):  # for one that draws from a global generator
            parts = call("partitioner", config.partition, partitioner, labels[rows], config.clients, **how)
    notes = []
    for warning in caught:
        if issubclass(warning.category, PartitionWarning):
            notes.append(str(warning.message))
        else:  # of NumPy, or of another thread
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if isinstance(parts, Mapping) or not hasattr(parts, "__len__"):
        found, expected = f"returned {type(parts).__name__}", "a list with one array of positions per client"
        raise PluginContractError.of(config.partition, found, kind="partitioner", expected=expected)
    shared = getattr(partitioner, "shares_samples", False) is True
    try:
        divided = IndexLists.of(parts)
        problem = problem_with(divided, IndexLists.empty(len(parts)), len(rows), shared=shared)
    except DataError as error:
        problem = str(error)
    if problem or len(parts) != config.clients:
        problem = problem or f"{len(parts)} parts for {config.clients} clients"
        raise PluginContractError.of(config.partition, f"returned an invalid partition: {problem}", kind="partitioner")
    if len(rows) < len(labels):
        positions = torch.from_numpy(rows).to(divided.positions.dtype)[divided.positions.long()]
        divided = IndexLists(positions, divided.offsets)
    return divided, notes, shared


def with_unseen(partition: Partition, share: float, seed: int) -> Partition:
    """Return a partition whose last clients are the unseen ones, drawn from the seed. The others keep their order.

    Methods number the clients that take part from 0, so the ids change and not the samples of a client.

    :param share: the share of the clients that never train.
    :raises ConfigError: the partition has another share of unseen clients, or its clients hold their own data.
    """
    made = partition.info.get("unseen_clients", 0)
    if made == share:
        return partition
    if made or partition.is_declared:
        why = f"the partition has {made!r} of its clients unseen" if made else "these clients hold their own data"
        raise ConfigError(f"--unseen-clients is {share:g}, but {why}; write --unseen-clients {made!r}")
    clients = partition.num_clients
    unseen = numpy_generator(seed, "unseen").permutation(clients)[: round(share * clients)]
    order = [*np.setdiff1d(np.arange(clients), unseen), *np.sort(unseen)]
    train, test = ([part[k] for k in order] for part in (partition.train, partition.test))
    return Partition(train, test, {**partition.info, "unseen_clients": share})


def _long_tailed(labels: IntArray, num_classes: int, imbalance: float, seed: int) -> IntArray:
    """Return the positions of a long-tailed training set, ascending (Cui et al., CVPR 2019, section 5.1).

    Class c of C keeps n * imbalance^(-c / (C - 1)) samples, drawn from the seed, n the size of the largest class. A
    class that has fewer keeps all of them.
    """
    if imbalance == 1:
        return np.arange(len(labels))
    rng, kept = numpy_generator(seed, "imbalance"), []
    most = np.bincount(labels).max()
    for c in range(num_classes):
        size = max(1, int(most * imbalance ** (-c / max(1, num_classes - 1))))
        kept.append(rng.permutation(np.flatnonzero(labels == c))[:size])
    return np.sort(np.concatenate(kept))


def _drawn(labels: IntArray, samples: int | None, seed: int) -> IntArray:
    """Return the positions to assign, ascending: all, or as many as ``samples``, drawn class by class."""
    if samples is None or samples == len(labels):
        return np.arange(len(labels))
    if samples > len(labels):
        raise ConfigError(f"--samples is {samples}, but there are {len(labels)} training samples to assign")
    share = samples / len(labels)
    drawn = np.flatnonzero(draw_by_class(labels, share, numpy_generator(seed, "samples")))
    if len(drawn) < samples:  # small classes gave less than their share, as the last sample of a class is never drawn
        rng = numpy_generator(seed, "samples")
        others = np.flatnonzero(~draw_by_class(labels, 1 - share, rng))
        drawn = np.sort(rng.permutation(others)[:samples])
    return drawn


def _hold_out(train: IndexLists, labels: IntArray, fraction: float, seed: int) -> tuple[IndexLists, IndexLists]:
    """Split the samples of every client; return the training positions and the hold-outs."""
    kept, held_out = [], []
    for client, indices in enumerate(train):
        rng = numpy_generator(seed, "holdout", client=client)
        mask = torch.from_numpy(draw_by_class(labels[indices.numpy()], fraction, rng))
        kept.append(indices[~mask])
        held_out.append(indices[mask])
    return IndexLists.of(kept), IndexLists.of(held_out)


def validation_split(held_out: Tensor, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a client's held-out part that choose the best round, and those that are reported.

    :param held_out: positions (n,) int64, of which ``int(n * share)`` are drawn.
    """
    if not share:
        return held_out[:0], held_out
    order = torch.from_numpy(numpy_generator(seed, "validation", client=client).permutation(len(held_out)))
    chooses = int(len(held_out) * share)
    return held_out[order[:chooses]], held_out[order[chooses:]]


def draw_by_class(labels: IntArray, fraction: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) bool that draws a fraction of ``labels`` (n,).

    Each class contributes its share, rounded down. The classes with the largest remainders contribute one sample more
    until the number is right. The last sample of a class is never drawn.
    """
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    give = np.minimum(np.floor(sizes * fraction).astype(np.int64), sizes - 1)
    open_places = math.floor(len(labels) * fraction + 0.5) - int(give.sum())
    if open_places > 0:
        remainder = np.where(give < sizes - 1, sizes * fraction - give, -1.0)
        takers = np.argsort(-remainder, kind="stable")[:open_places]
        give[takers[remainder[takers] >= 0]] += 1
    rank = np.arange(len(labels)) - np.repeat(starts, sizes)
    held_out = np.zeros(len(labels), dtype=np.bool_)
    held_out[by_class[rank < np.repeat(give, sizes)]] = True
    return held_out


def with_public(dataset: Dataset, public: str | None, seed: int, data_dir: Path | None) -> Dataset:
    """Return the data set with its public samples.

    :param public: a share of the training set, or the name of another data set, whose training samples become public.
    :raises ConfigError: the samples of the other data set do not fit the model of this one.
    """
    if public is None:
        return dataset
    if public_share(public) is not None:
        return replace(dataset, public=PublicSamples(dataset.train, public_rows(dataset.train.labels, public, seed)))
    other = load_dataset(public, data_dir)
    for what, found, expected in (
        ("kind", other.kind, dataset.kind),
        ("shape", tuple(other.input_shape), tuple(dataset.input_shape)),
    ):
        if found != expected:
            raise ConfigError(
                f"--public {public}: its samples have {what} {found}, but the samples of {dataset.name!r} have "
                f"{expected}; take a data set of the same kind, or a share of this one, such as --public 0.1"
            )
    samples, train = other.train, dataset.train
    if isinstance(samples, TensorSamples) and isinstance(train, TensorSamples):
        samples = samples.with_columns(train.columns, f"--public {public}")
    return replace(dataset, public=PublicSamples(samples, torch.arange(len(samples))))


def domain_rows(dataset: Dataset, name: str) -> Tensor:
    """Return the positions of a domain's training samples, ascending (n,) int64.

    :raises ConfigError: the data set has no domains.
    :raises UnknownNameError: it has no domain of this name.
    """
    if dataset.domains is None:
        raise ConfigError(f"--unseen-domain {name}: data set {dataset.name!r} has no domains; leave the option out")
    return (dataset.domains.train == dataset.domains.number(name)).nonzero().flatten()


def public_rows(labels: Tensor, public: str | None, seed: int) -> Tensor:
    """Return the positions of the training samples that are public, ascending (n,) int64, drawn class by class."""
    share = public_share(public)
    if share is None:
        return torch.empty(0, dtype=torch.int64)
    drawn = draw_by_class(labels.cpu().numpy(), share, numpy_generator(seed, "public"))
    return torch.from_numpy(drawn).nonzero().flatten()
