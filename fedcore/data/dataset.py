"""A data set: training and test samples, their description, and a digest of the content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedcore.base.errors import UnknownNameError
from fedcore.base.tensors import digest_of
from fedcore.data.samples import Samples
from fedcore.data.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class PublicSamples:
    """Samples that belong to no client."""

    samples: Samples
    """Training samples of the run's data set or of another one."""
    rows: Tensor
    """Which of these samples are public: positions, (n,) int64."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """Classes, (n,) int64. Labels of another data set may mean something else than the run's."""
        return self.samples.labels[self.rows.to(self.samples.labels.device)]

    def inputs(self, positions: Tensor) -> Any:
        """Return the model's input for the samples at positions 0..n-1 (B,) int64, in this order."""
        return self.samples.gather(self.rows[positions.to(self.rows.device)])


@dataclass(frozen=True)
class Domains:
    """The domains of a data set's samples, such as photos and sketches of the same classes."""

    names: tuple[str, ...]
    """Names of the domains 0..D-1."""
    train: Tensor
    """The domain of each training sample, (n,) int64."""
    test: Tensor
    """The domain of each test sample, (m,) int64."""

    def number(self, name: str) -> int:
        """Return the number of a domain.

        :raises UnknownNameError: there is no domain of this name.
        """
        if name not in self.names:
            raise UnknownNameError("domain", name, self.names)
        return self.names.index(name)


@dataclass(frozen=True)
class Dataset:
    """A training set, which is split among the clients, and a test set, on which models are only evaluated."""

    name: str
    """Name for the user."""
    train: Samples
    """Samples of the clients."""
    test: Samples
    """Samples on which the global model and the clients' own models are evaluated."""
    num_classes: int
    """C, the width of the logits; classes are 0..C-1."""
    input_shape: tuple[int, ...]
    """Shape of one sample, an argument of model factories: (C, H, W) for images. Other kinds define their own."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, for tables and pictures."""
    augmentation: str | None = None
    """Name of an :class:`~fedcore.data.client_data.Augmentation`, which ``--augment`` applies."""
    model: str | None = None
    """The model of ``--model auto``; None for the rule for images."""
    public: PublicSamples | None = None
    """Public samples of the run."""
    sources: Tensor | None = None
    """Number of each training sample's source, such as a writer or a hospital, (n,) int64, for ``natural``."""
    source_names: tuple[str, ...] | None = None
    """Names of the sources by their number, which clients with a source of their own then have."""
    groups: Tensor | None = None
    """Number of each training sample's group, such as a patient, (n,) int64: a group is on one side of every split."""
    domains: Domains | None = None
    """The samples' domains: the global model is then also evaluated on each of them."""
    notes: tuple[str, ...] = ()
    """Lines for the user, for example on arrays of a file that are not used."""
    task: Task = CLASSIFICATION
    """What the labels are, and how models are judged on them."""

    @property
    def kind(self) -> str:
        """The kind of batches, as models name it in ``takes``."""
        return self.train.kind

    @cached_property
    def strata(self) -> tuple[Tensor, list[str]]:
        """The training samples' classes or groups of similar labels, (n,) int64 on the CPU, and the groups' names."""
        groups = self.task.strata(self.train.labels.cpu())
        count = self.num_classes if self.task.classes else int(groups.max()) + 1
        return groups, list(self.class_names or map(str, range(count)))


def data_digest(dataset: Dataset) -> str:
    """Return a hexadecimal SHA-256 of samples, labels, classes, domains and input shape. The name is not part of it.

    A run resumes only on the samples that it started with.
    """
    described = [dataset.num_classes, list(dataset.input_shape), list(dataset.class_names or ()), dataset.augmentation]
    digests = []
    parts = [dataset.train, dataset.test]
    if dataset.public is not None and dataset.public.samples is not dataset.train:
        parts.append(dataset.public.samples)
    for samples in parts:
        try:
            tensors, meta = samples.tensors(), samples.meta()
        except (AttributeError, NotImplementedError):  # samples that are read from disk when they are gathered
            tensors, meta = {"labels": samples.labels}, {}
        digests.append(digest_of(tensors, json.dumps(meta, sort_keys=True)))
    if dataset.domains is not None:
        tensors = {"train": dataset.domains.train, "test": dataset.domains.test}
        digests.append(digest_of(tensors, json.dumps(dataset.domains.names)))
    return digest_of({}, json.dumps([described, digests]))
