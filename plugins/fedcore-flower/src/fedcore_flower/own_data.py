"""A client's own data: read, its hold-out set aside, and put in the place of the run's."""

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
    assemble,
    load_dataset,
    make_partition,
    read_npz,
)
from fedcore.engines import ClientSite
from fedcore_flower.agreement import Setup, check_data, class_order


@dataclass(frozen=True)
class OwnData:
    """A client's samples, all of them in ``dataset.train``.

    :param train: positions to train on, (n,) int64; ``test`` those held out.
    :param data_dir: where data sets are found.
    """

    dataset: Dataset
    train: Tensor
    test: Tensor
    data_dir: Path | None = None

    @classmethod
    def load(cls, spec: str, data_dir: Path | None, test_fraction: float | None, seed: int) -> OwnData:
        """Read a data set and set its hold-out aside.

        :param test_fraction: part of the training samples to hold out, drawn class by class; None takes the data
            set's own test samples instead.
        :raises FedcoreError: there is no such data, it is damaged, or has no training samples.
        """
        kind, _, rest = spec.partition(":")
        dataset = _npz(Path(rest).expanduser()) if kind == "npz" else load_dataset(spec, data_dir)
        if not len(dataset.train):
            raise DataError(f"--data {spec}: there are no training samples")
        if test_fraction is None:
            train, test = torch.arange(len(dataset.train)), torch.arange(len(dataset.test)) + len(dataset.train)
            return cls(replace(dataset, train=_joined(dataset, spec)), train, test, data_dir)
        if not 0 <= test_fraction < 1:
            raise ConfigError(f"--test-fraction {test_fraction}: it is a part of the data, at least 0 and below 1")
        one = RunConfig(partition="iid", clients=1, client_test_fraction=test_fraction, seed=seed)
        parts = make_partition(dataset, one)
        return cls(dataset, parts.train[0], parts.test[0], data_dir)

    def describe(self) -> dict[str, Any]:
        """Return all that the server is told of the data."""
        return {
            "train": len(self.train),
            "test": len(self.test),
            "kind": self.dataset.kind,
            "input_shape": list(self.dataset.input_shape),
            "num_classes": self.dataset.num_classes,
        }

    def spec(self, config: RunConfig, setup: Setup, state: Path) -> ClientSite:
        """Return where this client's tasks of a run are worked on.

        :raises ConfigError: the data is not what the run is about.
        """
        check_data(setup, self.dataset)
        if config.augment and self.dataset.augmentation is None:
            raise ConfigError(f"the run augments its images; the data here ({self.dataset.name}) has no augmentation")
        samples = _normalised(self.dataset.train, setup.normalisation)
        order = class_order(setup, self.dataset.class_names)
        if order is not None:
            samples = _renumbered(samples, order)
        public = _public(config.public, setup, self.data_dir)
        names = tuple(setup.class_names) if setup.class_names else None
        dataset = replace(self.dataset, train=samples, num_classes=setup.num_classes, class_names=names, public=public)
        train: list[Sequence[int]] = [[] for _ in range(setup.clients)]
        test: list[Sequence[int]] = [[] for _ in range(setup.clients)]
        train[setup.client], test[setup.client] = self.train.tolist(), self.test.tolist()
        info = Partition.declared([1], [0], self.dataset.name).info
        return ClientSite(config, dataset, Partition(train, test, info), state)


def _npz(path: Path) -> Dataset:
    """Return an ``.npz`` file's images; unlike a run's own data set, it need not have a sample of each class."""
    train, test = read_npz(path)
    if train.images.dtype != test.images.dtype:
        raise DataError(f"{path}: x_train and x_test must have the same type, both uint8 or both floating point")
    classes = int(max(split.labels.max() for split in (train, test) if len(split.labels))) + 1
    return assemble(f"npz:{path.name}", train, test, num_classes=classes)


def _public(name: str | None, setup: Setup, data_dir: Path | None) -> PublicSamples | None:
    """Return the run's public samples, a data set that this client has under the name that the server says.

    :raises ConfigError: the server names a file, not a data set that is installed here; or its samples do not fit.
    """
    if name is None:
        return None
    if ":" in name:
        raise ConfigError(
            f"the server's --public {name!r} names a file or code; a client takes installed data sets only"
        )
    dataset = load_dataset(name, data_dir)
    if dataset.kind != setup.kind or list(dataset.input_shape) != setup.input_shape:
        raise ConfigError(f"the public samples of {name!r} are not of the run's kind and shape {setup.input_shape}")
    return PublicSamples(dataset.train, torch.arange(len(dataset.train)))


def _joined(dataset: Dataset, spec: str) -> Samples:
    """Return training and test samples as one."""
    train, test = dataset.train, dataset.test
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
        f"--data {spec}: its test samples cannot be put beside its training samples; hold out some of these with "
        "--test-fraction"
    )


def _normalised(samples: Samples, stats: list[list[float]] | None) -> Samples:
    """Return samples normalised by the run's mean and standard deviation, so that a pixel or a number of a column is
    the same to all.
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


def _renumbered(samples: Samples, order: Sequence[int]) -> Samples:
    """Return samples whose class k is called ``order[k]``."""
    labels = torch.tensor(order, dtype=torch.int64)[samples.labels]
    renumbered = copy.copy(samples)
    object.__setattr__(renumbered, "labels", labels)  # a frozen dataclass, too
    return renumbered
