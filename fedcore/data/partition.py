"""A partition: the samples that each client holds, their hash, and the file format."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcore.base.errors import DataError, StorageError
from fedcore.base.files import write_text
from fedcore.base.serial import write_tensors
from fedcore.data.dataset import Dataset
from fedcore.data.index_lists import IndexLists
from fedcore.data.samples import JSON

FORMAT = "fedcore-partition-1"
SPLIT_FORMAT = "fedcore-partition-2"

TENSORS = {part: (f"{part}/positions", f"{part}/offsets") for part in ("train", "test")}
"""The names of the lists' tensors in the safetensors file."""

DECLARED = "declared"
"""Stands instead of a partitioner's name if each client holds its own data and declares its size."""

MAX_IN_JSON = 2_000_000
"""Maximum number of positions in the JSON file (about 15 MB). More go into a safetensors file next to it."""


class Partition:
    """The training samples that each client holds. ``sha256`` identifies a partition.

    :param train: one (n_k,) int64 tensor per client: positions in the *training* set of the data set.
    :param test: positions of each client's hold-out, also in the training set; may be empty.
    :param info: origin of the partition: dataset, labels_sha256, partitioner, alpha, classes_per_client,
        client_test_fraction, seed, notes. ``shares_samples`` is present if clients may hold the same sample.
        ``samples``, the number of assigned samples, is present if not all were assigned.
    """

    def __init__(self, train: Sequence[Tensor], test: Sequence[Tensor], info: dict[str, JSON]) -> None:
        self.train, self.test, self.info = IndexLists.of(train), IndexLists.of(test), info

    @classmethod
    def declared(cls, train: Sequence[int], test: Sequence[int], dataset: str) -> Partition:
        """Return the partition of clients that hold their own data: only the numbers of samples are known.

        Its positions are placeholders.

        :param train: number of training samples per client, at least 1 each.
        :param test: number of held-out samples per client.
        :param dataset: name of the server's own data set, on which the global model is evaluated.
        """
        sizes = torch.tensor([train, test], dtype=torch.int64).T.flatten().tolist()
        parts = torch.arange(sum(sizes)).split(sizes)
        info: dict[str, JSON] = {
            "dataset": dataset,
            "labels_sha256": "",
            "partitioner": DECLARED,
            "alpha": 0.0,
            "classes_per_client": 0,
            "client_test_fraction": 0.0,
            "seed": 0,
            "notes": [],
        }
        return cls(parts[0::2], parts[1::2], info)

    @property
    def is_declared(self) -> bool:
        """Whether the clients hold their own data. Then only the sizes are known."""
        return self.info["partitioner"] == DECLARED

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the index lists alone, in their order: hexadecimal."""
        digest = hashlib.sha256(FORMAT.encode())
        for parts in (self.train, self.test):
            count = torch.tensor([len(parts)])
            for block in (count, parts.sizes, *parts.positions.split(1 << 16)):  # as int64 they take twice the memory
                digest.update(np.ascontiguousarray(block.numpy(), dtype="<i8").data)
        return digest.hexdigest()

    def class_counts(self, labels: Tensor, num_classes: int) -> Tensor:
        """Return the number of training samples per client and class: (K, C) int64.

        The hold-out is not counted.

        :param labels: labels of the whole training set, (n,) int64.
        """
        client = torch.repeat_interleave(torch.arange(self.num_clients), self.train.sizes)
        cell = client * num_classes + labels[self.train.positions.long()]
        return torch.bincount(cell, minlength=self.num_clients * num_classes).view(-1, num_classes)

    def save(self, path: Path) -> None:
        """Write the partition as JSON, atomically.

        More than ``MAX_IN_JSON`` positions are written to a safetensors file next to it, which the JSON file names.

        :raises DataError: the file cannot be written.
        """
        parts = {"train": self.train, "test": self.test}
        sha256 = self.sha256
        content: dict[str, Any] = {"format": FORMAT, "sha256": sha256, "info": self.info}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if sum(len(part.positions) for part in parts.values()) <= MAX_IN_JSON:
                content.update({name: part.tolists() for name, part in parts.items()})
            else:
                # Named by its content, so the file that an older JSON file names is not overwritten.
                beside = path.with_name(f"{path.stem}-{sha256[:16]}.safetensors")
                tensors = {TENSORS[name][0]: part.positions for name, part in parts.items()}
                tensors.update({TENSORS[name][1]: part.offsets for name, part in parts.items()})
                write_tensors(beside, tensors)
                content.update(format=SPLIT_FORMAT, clients=self.num_clients, file=beside.name)
            write_text(path, json.dumps(content) + "\n")
        except (OSError, StorageError) as error:
            raise DataError(f"cannot write the partition file {path}: {error}") from error


def problem_with(train: IndexLists, test: IndexLists, size: int, *, shared: bool = False) -> str | None:
    """Return the defect of a partition of ``size`` samples, or None.

    :param shared: whether clients may hold the same sample.
    """
    if not len(train):
        return "there are no clients"
    if len(train) != len(test):
        return f"training lists of {len(train)} clients, but hold-out lists of {len(test)}"
    without = (train.offsets[1:] == train.offsets[:-1]).nonzero()
    if len(without):
        return f"client {int(without[0])} has no training samples"
    for positions in (part.positions for part in (train, test) if len(part.positions)):
        if int(positions.min()) < 0 or int(positions.max()) >= size:
            return f"there are indices outside 0..{size - 1}"
    if shared:
        return "clients share samples, so no sample can be held out" if len(test.positions) else None
    ordered = np.concatenate([train.positions.numpy(), test.positions.numpy()])
    ordered.sort()  # in place: torch's sort takes four times the memory
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return f"sample {int(twice[0])} is used more than once" if len(twice) else None


def labels_sha256(dataset: Dataset) -> str:
    """Return the hash of a data set's training labels, hexadecimal: a partition fits data sets with the same hash."""
    labels = np.ascontiguousarray(dataset.train.labels.cpu().numpy(), dtype="<i8")
    return hashlib.sha256(labels.data).hexdigest()
