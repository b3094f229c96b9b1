"""Assign a data set's training samples: to the public, to clients by a partitioner, and to each client's hold-out."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.config import RunConfig, public_share
from fedcore.base.errors import ConfigError, DataError, PluginContractError, UnknownNameError, flag_of
from fedcore.base.output import clean
from fedcore.base.registry import call, resolve
from fedcore.base.section import Trait
from fedcore.base.seeding import derive_seed, numpy_generator, random_stream
from fedcore.data.dataset import Dataset, PublicSamples
from fedcore.data.loading import load_dataset
from fedcore.data.partition import IndexLists, Partition, labels_sha256, plain_info, problem_with_lists
from fedcore.data.partitioners import MIN_SIZE, IntArray, PartitionWarning
from fedcore.data.samples import JSON, TensorSamples


class Partitioner(Protocol):
    """Divide samples among clients; an entry point of the group ``fedcore.partitioners``.

    A scheme names the arguments that it needs and takes the others as ``**_``. With the attribute
    ``shares_samples = True`` it may assign one sample to several clients.

    :param labels: classes of the samples to assign, (n,) int64; for a task without classes, groups of similar labels.
    :param dataset: the run's data set.
    :param rows: the position of each sample in ``dataset.train``, (n,) int64, ascending. With ``--samples``,
        ``--imbalance``, ``--unseen-domain`` or a share as ``--public`` some positions are missing. The model's inputs
        are ``dataset.train.gather(torch.from_numpy(rows))``.
    :returns: One array of positions in ``labels`` per client: disjoint, not empty, in any order, the same for the
        same arguments; a mapping if the clients have names, such as hospitals. For millions of clients return an
        :class:`~fedcore.data.IndexLists`.
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


def make_partition(dataset: Dataset, options: RunConfig) -> Partition:
    """Split the training set of ``dataset`` among clients and separate each client's hold-out.

    The hold-out is ``client_test_fraction`` of the client's samples, drawn class by class. The last sample of a class
    stays in training, so every client keeps some.

    :param options: a run's configuration: ``RunConfig(partition="dirichlet", clients=20)``.
    :returns: The partition. Its ``info["notes"]`` has the warnings of the partitioner.
    :raises UnknownNameError: no installed package provides the partitioner.
    :raises ConfigError: the numbers contradict each other or the data.
    :raises PluginContractError: the partitioner raised, or returned something other than disjoint, non-empty parts.
    """
    return Scenario(options, dataset).partition()


@dataclass(frozen=True)
class Scenario:
    """Which training samples of a data set are divided among clients, and which clients never train.

    The options for public samples and unseen clients are resolved here. Sections of packages leave out more samples.
    """

    options: RunConfig
    dataset: Dataset

    @property
    def further(self) -> dict[str, JSON]:
        """The options of packages by which it is decided who holds which samples, next to the core's own."""
        return self.options.of_packages(Trait.PARTITION)

    @functools.cached_property
    def labels(self) -> IntArray:
        """Classes of the training samples, or groups of similar labels, (n,) int64."""
        return self.dataset.strata[0].numpy()

    @functools.cached_property
    def public(self) -> Tensor:
        """Positions of the training samples that are public, ascending (n,) int64."""
        return public_rows(self.dataset, self.options.public, self.options.seed)

    @functools.cached_property
    def rows(self) -> IntArray:
        """Positions of the training samples to divide, ascending (n,) int64.

        :raises ConfigError: an option does not fit the data set.
        """
        rows = np.setdiff1d(np.arange(len(self.labels)), self.public.numpy())
        for section in RunConfig.sections():
            rows = section.divided(self.options, self.dataset, rows)
        return rows

    def partition(self) -> Partition:
        """Divide the samples by the configured partitioner, as :func:`make_partition` does."""
        options = self.options
        how = options.model_dump(include={"alpha", "classes_per_client", "seed"})
        train, notes, shared, names = self._divide(how)
        test = IndexLists.empty(len(train))
        if fraction := options.client_test_fraction:
            if shared:
                held = f"{options.partition!r} may assign a held-out sample to another client too"
                raise ConfigError(f"client_test_fraction must be 0: {held}")
            train, test = _hold_out(train, self.labels, fraction, options.seed)
        if self.dataset.groups is not None:
            train, test = resolve("feature", "whole_groups")(train, test, self.dataset.groups, options)
        info = plain_info(self.dataset.name, labels_sha256(self.dataset), options.partition)
        info |= {**how, "client_test_fraction": fraction, "notes": [*notes]}
        further: dict[str, JSON] = {"shares_samples": shared, "public": len(self.public), "names": [*names]}
        info |= {name: value for name, value in (further | self.further).items() if value}
        return self.with_unseen_clients(Partition(train, test, info))

    def _divide(self, options: Mapping[str, Any]) -> tuple[IndexLists, list[str], bool, list[str]]:
        """Let the partitioner divide the samples.

        :returns: Each client's positions in the training set, the partitioner's notes, whether clients may share
            samples, and the clients' names.
        """
        name, clients, rows = self.options.partition, self.options.clients, self.rows
        partitioner, labels = resolve("partitioner", name), self.labels
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PartitionWarning)
            how = {**options, "min_size": MIN_SIZE, "dataset": self.dataset, "rows": rows}
            # A partitioner may draw from a global generator.
            with random_stream(derive_seed(self.options.seed, "partitioner")):
                parts = call("partitioner", name, partitioner, labels[rows], clients, **how)
        notes = []
        for warning in caught:
            if issubclass(warning.category, PartitionWarning):
                notes.append(str(warning.message))
            else:  # of NumPy, or of another thread
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        names, parts = ([*parts], [*parts.values()]) if isinstance(parts, Mapping) else ([], parts)
        if not hasattr(parts, "__len__"):
            fault, expected = f"returned {type(parts).__name__}", "a list with one array of positions per client"
            raise PluginContractError.of(name, fault, kind="partitioner", expected=expected)
        shared = getattr(partitioner, "shares_samples", False) is True
        try:
            divided = IndexLists.of(parts)
            problem = problem_with_lists(divided, IndexLists.empty(len(parts)), len(rows), shared=shared)
        except DataError as error:
            problem = str(error)
        if problem or len(parts) != clients:
            problem = problem or f"{len(parts)} parts for {clients} clients"
            raise PluginContractError.of(name, f"returned an invalid partition: {problem}", kind="partitioner")
        if len(rows) < len(labels):
            positions = torch.from_numpy(rows).to(divided.positions.dtype)[divided.positions.long()]
            divided = IndexLists(positions, divided.offsets)
        return divided, notes, shared, [clean(str(name)) for name in names]

    def check(self, partition: Partition, where: str) -> None:
        """Refuse options that contradict a partition which was made before the run.

        :param where: the file or another word for the partition, for messages.
        :raises ConfigError: with the option and the remedy.
        """
        options = self.options
        if partition.num_clients != options.clients:
            raise ConfigError(
                f"--clients is {options.clients}, but {where} has {partition.num_clients} clients; write --clients "
                f"{partition.num_clients}"
            )
        if partition.is_declared:
            if public_share(options.public) is not None:
                raise ConfigError(
                    f"--public {options.public} is a share of the training set that simulated clients split, but these "
                    "clients hold their own data; name a data set that the server and every client have"
                )
            return
        again = "make the partition again (fedcore data split, or fedcore.data.make_partition) with"
        if options.client_test_fraction not in (0, partition.info["client_test_fraction"]):
            raise ConfigError(
                f"--client-test-fraction is {options.client_test_fraction}, but {where} was made with "
                f"{partition.info['client_test_fraction']}; leave it out, or {again} --client-test-fraction "
                f"{options.client_test_fraction}"
            )
        held = torch.cat([partition.train.positions, partition.test.positions]).numpy()
        if outside := int(np.isin(held, self.rows, invert=True).sum()):
            chosen = {"public": options.public} if len(self.public) else {}
            taken = " and ".join(f"{flag_of(name)} {value}" for name, value in {**chosen, **self.further}.items())
            raise ConfigError(
                f"{where} gives clients {outside} samples that {taken} takes from them; leave the option out, or "
                f"{again} the same options and --seed"
            )

    def with_unseen_clients(self, partition: Partition) -> Partition:
        """Return a partition whose last clients are the unseen ones, named or drawn. The others keep their order.

        Methods number the clients that take part from 0, so the ids change and not the samples of a client.

        :raises ConfigError: the partition has another share of unseen clients, or its clients hold their own data.
        """
        options, made = self.options, partition.info.get("unseen_clients", 0)
        share: Any = options.unseen_clients
        if made == share:
            return partition
        if made or partition.is_declared:
            why = f"the partition has {made!r} of its clients unseen" if made else "these clients hold their own data"
            raise ConfigError(f"--unseen-clients is {share}, but {why}; write --unseen-clients {made!r}")
        clients, names = partition.num_clients, partition.names
        unseen = numpy_generator(options.seed, "unseen").permutation(clients)[: clients - options.training_clients]
        if isinstance(share, list):
            if wrong := [name for name in share if name not in names]:
                raise UnknownNameError("client", wrong[0], names, '--unseen-clients takes a share or A,"B, C"')
            unseen = np.array([names.index(name) for name in share])
        order = [*np.setdiff1d(np.arange(clients), unseen), *np.sort(unseen)]
        train, test = ([part[k] for k in order] for part in (partition.train, partition.test))
        moved = {"names": [names[k] for k in order]} if "names" in partition.info else {}
        return Partition(train, test, partition.info | {"unseen_clients": share, **moved})


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
        return replace(dataset, public=PublicSamples(dataset.train, public_rows(dataset, public, seed)))
    other = load_dataset(public, data_dir)
    for what, theirs, ours in (
        ("kind", other.kind, dataset.kind),
        ("shape", tuple(other.input_shape), tuple(dataset.input_shape)),
    ):
        if theirs != ours:
            raise ConfigError(
                f"--public {public}: its samples have {what} {theirs}, but the samples of {dataset.name!r} have "
                f"{ours}; take a data set of the same kind, or a share of this one, such as --public 0.1"
            )
    samples, train = other.train, dataset.train
    if isinstance(samples, TensorSamples) and isinstance(train, TensorSamples):
        samples = samples.with_columns(train.columns, f"--public {public}")
    return replace(dataset, public=PublicSamples(samples, torch.arange(len(samples))))


def public_rows(dataset: Dataset, public: str | None, seed: int) -> Tensor:
    """Return the positions of the training samples that are public, ascending (n,) int64, drawn class by class."""
    share = public_share(public)
    if share is None:
        return torch.empty(0, dtype=torch.int64)
    drawn = draw_by_class(dataset.strata[0].numpy(), share, numpy_generator(seed, "public"))
    return torch.from_numpy(drawn).nonzero().flatten()
