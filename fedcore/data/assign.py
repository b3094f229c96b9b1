"""Assign a data set's training samples: to the public, to clients by a partitioner, and to each client's hold-out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.choices import public_share
from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.base.registry import call, resolve
from fedcore.base.seeding import numpy_generator
from fedcore.data.dataset import Dataset, PublicSamples
from fedcore.data.index_lists import IndexLists
from fedcore.data.loading import load_dataset
from fedcore.data.partition import Partition, labels_sha256, problem_with
from fedcore.data.partitioners import MIN_SIZE, IntArray, PartitionWarning
from fedcore.data.samples import JSON


class Partitioner(Protocol):
    """Divide samples among clients; an entry point of the group ``fedcore.partitioners``.

    ``labels`` (n,) int64 are the classes of the samples to assign. Returns one array of positions into ``labels`` per
    client: disjoint, none empty, in random order, the same for the same arguments. A scheme names the arguments that it
    needs and takes the others as ``**_``. For millions of clients return an :class:`~fedcore.data.IndexLists`. A scheme
    with the attribute ``shares_samples = True`` may assign one sample to several clients.

    ``dataset`` is the run's data set and ``rows`` (n,) int64, ascending, where each sample stands in ``dataset.train``:
    ``labels[i]`` is the class of row ``rows[i]``. With ``--samples`` or a share as ``--public`` some rows are missing.
    The model's inputs are ``dataset.train.gather(torch.from_numpy(rows))``.
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


def partition(
    name: str,
    labels: IntArray,
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    classes_per_client: int = 2,
    min_size: int = MIN_SIZE,
    **data: Any,
) -> tuple[Sequence[Any], list[str]]:
    """Call the partitioner ``name``; return its index arrays and its warnings, which are also issued.

    :param data: ``dataset`` and ``rows``, as :class:`Partitioner` takes them.
    :raises UnknownNameError: no partitioner of that name.
    :raises ConfigError: impossible numbers, such as more clients than samples.
    """
    partitioner: Partitioner = resolve("partitioner", name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PartitionWarning)
        parts = call(
            "partitioner",
            name,
            partitioner,
            labels,
            num_clients,
            alpha=alpha,
            seed=seed,
            min_size=min_size,
            classes_per_client=classes_per_client,
            **data,
        )
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return parts, [str(w.message) for w in caught if issubclass(w.category, PartitionWarning)]


def shares_samples(name: str) -> bool:
    """Return whether the partitioner ``name`` may assign one sample to several clients."""
    return getattr(resolve("partitioner", name), "shares_samples", False) is True


def make_partition(
    dataset: Dataset,
    *,
    partitioner: str,
    clients: int,
    alpha: float,
    classes_per_client: int,
    client_test_fraction: float,
    seed: int,
    samples: int | None = None,
    public: Tensor | None = None,
) -> Partition:
    """Split the training set of ``dataset`` among ``clients`` and separate each client's hold-out.

    The hold-out is ``client_test_fraction`` (in [0, 1)) of the client's samples, drawn class by class; a
    class of which the client has one sample stays in training, so a client always keeps some.

    :param samples: the number of samples to assign, drawn in proportion to the classes; None assigns all.
    :param public: positions of samples that no client gets, (n,) int64.
    :raises ConfigError: the numbers contradict each other or the data.
    :raises PluginContractError: the partitioner returned something other than disjoint, non-empty parts.
    """
    if not 0 <= client_test_fraction < 1:
        raise ConfigError(f"client_test_fraction must be in [0, 1), not {client_test_fraction}")
    labels = dataset.train.labels.cpu().numpy()
    private = np.arange(len(labels)) if public is None else np.setdiff1d(np.arange(len(labels)), public.numpy())
    assigned = private[_drawn(labels[private], samples, seed)]
    parts, notes = partition(
        partitioner,
        labels[assigned],
        clients,
        alpha,
        seed,
        classes_per_client=classes_per_client,
        dataset=dataset,
        rows=assigned,
    )
    train, test, shared = IndexLists.of(parts), IndexLists.empty(len(parts)), shares_samples(partitioner)
    problem = problem_with(train, test, len(assigned), shared=shared)
    if problem or len(parts) != clients:
        problem = problem or f"{len(parts)} parts for {clients} clients"
        raise PluginContractError.of(partitioner, f"returned an invalid partition: {problem}", kind="partitioner")
    if len(assigned) < len(labels):
        train = IndexLists(torch.from_numpy(assigned).to(train.positions.dtype)[train.positions.long()], train.offsets)
    if client_test_fraction and shared:
        raise ConfigError(
            f"client_test_fraction must be 0: {partitioner!r} may assign a held-out sample to another client too"
        )
    if client_test_fraction:
        train, test = _hold_out(train, labels, client_test_fraction, seed)
    info: dict[str, JSON] = {
        "dataset": dataset.name,
        "labels_sha256": labels_sha256(dataset),
        "partitioner": partitioner,
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "client_test_fraction": client_test_fraction,
        "seed": seed,
        "notes": list(notes),
    }
    if shared:
        info["shares_samples"] = True
    if samples is not None:
        info["samples"] = len(assigned)
    if public is not None:
        info["public"] = len(public)
    return Partition(train, test, info)


def _drawn(labels: IntArray, samples: int | None, seed: int) -> IntArray:
    """Return the positions to assign, ascending: all, or ``samples`` of them drawn class by class."""
    if samples is None or samples == len(labels):
        return np.arange(len(labels))
    if samples > len(labels):
        raise ConfigError(f"--samples is {samples}, but the data set has {len(labels)} training samples")
    return np.flatnonzero(draw_by_class(labels, samples / len(labels), numpy_generator(seed, "samples")))


def _hold_out(train: IndexLists, labels: IntArray, fraction: float, seed: int) -> tuple[IndexLists, IndexLists]:
    """Split every client's samples; returns the training positions and the hold-outs."""
    kept, held_out = [], []
    for client, indices in enumerate(train):
        rng = numpy_generator(seed, "holdout", client=client)
        mask = torch.from_numpy(draw_by_class(labels[indices.numpy()], fraction, rng))
        kept.append(indices[~mask])
        held_out.append(indices[mask])
    return IndexLists.of(kept), IndexLists.of(held_out)


def draw_by_class(labels: IntArray, fraction: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) bool that draws a fraction of ``labels`` (n,).

    Each class contributes its share, rounded down; the rest is taken one by one from the classes with the largest
    remainders. The last sample of a class is never drawn.
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

    :param public: a share of the training set, or the name of another data set, whose training samples are taken.
    :raises ConfigError: the other data set's samples do not fit the model of this one.
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
                f"--public {public}: its samples are of {what} {found}, those of {dataset.name!r} of {expected}; take "
                "a data set of the same kind, or a share of this one, such as --public 0.1"
            )
    return replace(dataset, public=PublicSamples(other.train, torch.arange(len(other.train))))


def public_rows(labels: Tensor, public: str | None, seed: int) -> Tensor:
    """Return the positions of the training samples that are public, ascending (n,) int64, drawn class by class."""
    share = public_share(public)
    if share is None:
        return torch.empty(0, dtype=torch.int64)
    drawn = draw_by_class(labels.cpu().numpy(), share, numpy_generator(seed, "public"))
    return torch.from_numpy(drawn).nonzero().flatten()
