"""A client's own data. It is read and split into training and held-out samples, and replaces the run's data set."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import (
    Dataset,
    Partition,
    PublicSamples,
    ResidentSamples,
    Samples,
    TensorSamples,
    load_dataset,
    make_partition,
    numbered_as,
)
from fedcore.engines import ClientSite
from fedcore_flower.agreement import Setup, check_data, of_task


@dataclass(frozen=True)
class OwnData:
    """A client's samples."""

    dataset: Dataset
    """The data set. Its ``train`` has all samples of the client."""
    train: Tensor
    """The positions of the samples to train on, (n,) int64."""
    test: Tensor
    """The positions of the held-out samples, (m,) int64."""
    data_dir: Path | None = None
    """The folder of named data sets; None for the default."""

    @classmethod
    def load(cls, spec: str, data_dir: Path | None, test_fraction: float | None, seed: int) -> OwnData:
        """Read a data set and split it.

        :param spec: the data set, as ``--data`` names it.
        :param test_fraction: the part of the training samples to hold out, drawn class by class. None holds out the
            test samples of the data set.
        :param seed: the seed of the draw.
        :raises FedcoreError: the data does not exist, is damaged, or has no training samples.
        """
        part = ""  # in contrast to a run's data set a client's need not have all classes, or test samples
        divided = spec.startswith("npz:") or (spec.startswith("hf:") and test_fraction is not None)
        if divided and "part=yes" not in spec.partition("?")[2]:
            part = f"{'&' if '?' in spec else '?'}part=yes"
        dataset = load_dataset(spec + part, data_dir)
        if not len(dataset.train):
            raise DataError(f"--data {spec}: the data set has no training samples")
        if test_fraction is None:
            train, test = torch.arange(len(dataset.train)), torch.arange(len(dataset.test)) + len(dataset.train)
            return cls(replace(dataset, train=_joined(dataset, spec)), train, test, data_dir)
        if not 0 <= test_fraction < 1:
            raise ConfigError(f"--test-fraction {test_fraction}: give a number of at least 0 and below 1")
        one = RunConfig(partition="iid", clients=1, client_test_fraction=test_fraction, seed=seed)
        parts = make_partition(dataset, one)
        return cls(dataset, parts.train[0], parts.test[0], data_dir)

    def describe(self) -> dict[str, Any]:
        """Return everything that the server learns about the data before the run, unless it asks for statistics."""
        return {
            "train": len(self.train),
            "test": len(self.test),
            "kind": self.dataset.kind,
            "input_shape": list(self.dataset.input_shape),
            "num_classes": self.dataset.num_classes,
            "class_names": list(self.dataset.class_names) if self.dataset.class_names else None,
        }

    def site(self, config: RunConfig, setup: Setup, state: Path) -> ClientSite:
        """Return the site that runs this client's tasks.

        :param state: the folder of the client's states of this run.
        :raises ConfigError: the data does not fit the run.
        :raises DataError: the run does not have a class of the data.
        """
        dataset = of_task(setup, self.dataset)
        own = dataset.train
        if hasattr(own, "by_recipe") and setup.recipe:
            own = own.by_recipe(setup.recipe)
        elif hasattr(own, "by_recipe") and setup.columns and setup.normalisation:
            mean, std = setup.normalisation
            own = own.by_recipe({"columns": setup.columns, "mean": mean, "std": std})
        if isinstance(own, TensorSamples):
            own = own.with_columns(setup.columns, f"the client's table {self.dataset.name}")
        shape = tuple(own.inputs.shape[1:]) if isinstance(own, TensorSamples) else dataset.input_shape
        dataset = replace(dataset, notes=(*dataset.notes, *getattr(own, "notes", ())), input_shape=shape)
        check_data(setup, dataset)
        samples = _normalised(own, setup.normalisation)
        if dataset.class_names and setup.class_names:
            where = "the client's data in the run"
            labels = numbered_as(samples.labels, dataset.class_names, setup.class_names, where)
            samples = _labelled(samples, labels)
        public = _public(config.public, setup, self.data_dir)
        names = tuple(setup.class_names) if setup.class_names else None
        dataset = replace(dataset, train=samples, num_classes=setup.num_classes, class_names=names, public=public)
        train: list[Sequence[int]] = [[] for _ in range(setup.clients)]
        test: list[Sequence[int]] = [[] for _ in range(setup.clients)]
        train[setup.client], test[setup.client] = self.train.tolist(), self.test.tolist()
        info = Partition.declared([1], [0], self.dataset.name).info
        partition = Partition(train, test, {**info, "own": setup.client})
        for section in RunConfig.sections():
            dataset = section.prepared(config, dataset, partition)
        if config.augment and dataset.augmentation is None:
            raise ConfigError(
                f"the run augments its images, but the client's data ({self.dataset.name}) has no augmentation"
            )
        return ClientSite(config, dataset, partition, state)


def _public(name: str | None, setup: Setup, data_dir: Path | None) -> PublicSamples | None:
    """Return the run's public samples, from an installed data set of this name.

    :raises ConfigError: the server names a file or code, no such data set is installed, or its samples do not fit.
    """
    if name is None:
        return None
    if ":" in name:
        raise ConfigError(
            f"the server's --public {name!r} names a file or code; a client only takes installed data sets"
        )
    dataset = load_dataset(name, data_dir)
    if dataset.kind != setup.kind or list(dataset.input_shape) != setup.input_shape:
        raise ConfigError(f"the public samples of {name!r} do not have the run's kind and shape {setup.input_shape}")
    samples = dataset.train
    if isinstance(samples, TensorSamples):
        samples = samples.with_columns(setup.columns, f"the public table {name}")
    if setup.config.get("normalize", "as-loaded") != "as-loaded":  # then the server's are by the run's numbers, too
        samples = _normalised(samples, setup.normalisation)
    return PublicSamples(samples, torch.arange(len(samples)))


def _joined(dataset: Dataset, spec: str) -> Samples:
    """Return the training samples, followed by the test samples.

    :raises ConfigError: their forms differ.
    """
    train, test = dataset.train, dataset.test
    if hasattr(train, "followed_by"):  # a table with its cells
        joined: Samples = train.followed_by(test)
        return joined
    if isinstance(train, ResidentSamples) and isinstance(test, ResidentSamples):
        same = (train.mean, train.std, train.images.dtype) == (test.mean, test.std, test.images.dtype)
        if same and train.images.shape[1:] == test.images.shape[1:]:
            images = torch.cat([train.images, test.images])
            return ResidentSamples(images, torch.cat([train.labels, test.labels]), train.mean, train.std)
    if train.kind == test.kind == "tensor" and train.fixed_shape:
        inputs = torch.cat([part.gather(torch.arange(len(part))) for part in (train, test)])
        known = {name: getattr(train, name, ()) for name in ("mean", "std", "columns")}
        if known == {name: getattr(test, name, ()) for name in known}:
            return TensorSamples(inputs, torch.cat([train.labels, test.labels]), **known)
    raise ConfigError(
        f"--data {spec}: its test samples do not have the form of its training samples; give --test-fraction to hold "
        "out training samples instead"
    )


def _normalised(samples: Samples, stats: list[list[float]] | None) -> Samples:
    """Return samples that are normalised by the run's mean and standard deviation instead of their own.

    A value of a pixel or of a column then means the same at all clients.
    """
    if stats is None or not isinstance(samples, (ResidentSamples, TensorSamples)) or not samples.mean:
        return samples
    if stats == [list(samples.mean), list(samples.std)]:
        return samples
    if isinstance(samples, TensorSamples):
        own, common = (torch.tensor(pair, dtype=torch.float64) for pair in ((samples.mean, samples.std), stats))
        raw = samples.inputs * own[1] + own[0]
        inputs = ((raw - common[0]) / common[1]).to(samples.inputs.dtype)
        return TensorSamples(inputs, samples.labels, mean=stats[0], std=stats[1], columns=samples.columns)
    images = samples.images
    if images.dtype == torch.float32:
        mean, std = (torch.tensor(own).view(-1, 1, 1) for own in (samples.mean, samples.std))
        images = images * std + mean
    return ResidentSamples.from_pixels(images, samples.labels, *stats)


def _labelled(samples: Samples, labels: Tensor) -> Samples:
    """Return the samples with these labels (n,)."""
    labelled = copy.copy(samples)
    object.__setattr__(labelled, "labels", labels)  # works on a frozen dataclass, too
    return labelled
