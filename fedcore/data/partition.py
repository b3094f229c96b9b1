"""A partition: the samples that each client holds, their hash, and the file, which may be from elsewhere."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.errors import ConfigError, DataError, StorageError
from fedcore.base.files import parse_json, write_text
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.base.tensors import flatten, unflatten
from fedcore.data.dataset import Dataset
from fedcore.data.samples import JSON, check_offsets, first_ten

Clients: TypeAlias = "Sequence[Any] | Mapping[str, Any] | IndexLists"
"""The positions of each client, in the clients' order or by their names."""

FORMAT = "fedcore-partition-1"
SPLIT_FORMAT = "fedcore-partition-2"

DECLARED = "declared"
"""Stands instead of a partitioner's name if each client holds its own data and declares its size."""

MAX_IN_JSON = 2_000_000
"""Maximum number of positions in the JSON file (about 17 MB). More go into a safetensors file next to it."""

_PAIRS = ". Clients with test sets of their own: fedcore.data.Partition(train, test), one array per client in each"

_INT32 = torch.iinfo(torch.int32)

_INFO: dict[str, tuple[type | tuple[type, ...], str]] = {
    "dataset": (str, "a name"),
    "labels_sha256": (str, "the hash of the data set's labels"),
    "partitioner": (str, "a name"),
    "client_test_fraction": ((int, float), "a number"),
    "notes": (list, "a list of strings"),
}
"""The entries of ``info`` that a run needs -> the type, and the type in words."""


class IndexLists:
    """One (n_k,) int64 tensor per client, created on access: the positions that each client holds.

    A list of tensors takes 1 kB per client, this class 8 bytes per client and 4 per position.

    :param positions: the positions of all clients, concatenated: (n,) int32 or int64.
    :param offsets: the start of each client's positions, and the end of the last: (K + 1,) int64.
    """

    def __init__(self, positions: Tensor, offsets: Tensor) -> None:
        self.positions, self.offsets = positions, offsets
        self._bounds = offsets.numpy()  # the same memory; torch takes twenty times as long for one element

    @classmethod
    def of(cls, lists: Clients) -> IndexLists:
        """Concatenate one tensor or array of integers per client; an :class:`IndexLists` is returned unchanged.

        :raises DataError: a part does not hold integers of shape (n,).
        """
        if isinstance(lists, IndexLists):
            return lists
        arrays = [_positions(part, client) for client, part in enumerate(lists)]
        positions = torch.from_numpy(np.concatenate(arrays) if arrays else np.empty(0, np.int64))
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        if len(positions) == 0 or (_INT32.min <= positions.min() and positions.max() <= _INT32.max):
            positions = positions.to(torch.int32)
        return cls(positions, torch.from_numpy(offsets))

    @classmethod
    def empty(cls, clients: int) -> IndexLists:
        """Return empty lists for ``clients`` clients."""
        # NumPy's zeros take no memory until they are written, torch's do.
        return cls(torch.empty(0, dtype=torch.int32), torch.from_numpy(np.zeros(clients + 1, np.int64)))

    @property
    def sizes(self) -> Tensor:
        """The number of positions of each client, (K,) int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, client: int) -> Tensor:
        k = range(len(self))[client]  # counts from the end, and raises IndexError, as a list does
        return self.positions[self._bounds[k] : self._bounds[k + 1]].long()

    def size(self, client: int) -> int:
        """Return the number of positions of one client, without creating its tensor."""
        return int(self._bounds[client + 1] - self._bounds[client])

    def of_first(self, clients: int) -> Tensor:
        """Return the positions of the first clients together, (n,) int64: those of a run that train come first."""
        return self.positions[: self._bounds[clients]].long()

    def __iter__(self) -> Iterator[Tensor]:
        for begin, end in pairwise(self.offsets.tolist()):
            yield self.positions[begin:end].long()


def _positions(part: Any, client: int) -> npt.NDArray[np.int64]:
    """Return a client's positions as an array."""
    try:
        array = np.asarray(part)
        if array.dtype == object:  # a row of an array of lists
            array = np.asarray(array.tolist())
    except ValueError as error:
        raise DataError(f"client {client} has arrays of different lengths instead of positions{_PAIRS}") from error
    whole = array.dtype.kind in "iu" or (array.dtype.kind == "f" and np.array_equal(array, np.trunc(array)))
    if array.ndim != 1 or (array.size and not whole):
        hint = ". Of a mask: numpy.flatnonzero(mask)" if array.dtype.kind == "b" else _PAIRS * (array.ndim > 1)
        raise DataError(
            f"client {client} has {array.dtype} of shape {array.shape} instead of positions of samples, whole numbers "
            f"of shape (n,){hint}"
        )
    return array.astype(np.int64, copy=False)


class Partition:
    """The training samples that each client holds. ``sha256`` identifies a partition.

    :param train: one (n_k,) int64 tensor per client: positions in the *training* set of the data set. In a mapping
        by the clients' names, ``test`` is one of the same names.
    :param test: positions of each client's hold-out, also in the training set; may be empty.
    :param info: origin of the partition, as :func:`make_partition` writes it. Without it the run fills it in, with
        ``"python"`` as partitioner. Its keys: dataset, labels_sha256, partitioner, alpha, classes_per_client,
        client_test_fraction, seed, notes. ``shares_samples`` is present if clients may hold the same sample.
        These are present with the options of the same name: ``samples``, the number of assigned samples; ``public``,
        the number of public ones, for a share; ``unseen_domain``; ``unseen_clients``, the share or the names.
        ``names`` is present if the clients have some, such as hospitals: one for each.
    """

    def __init__(self, train: Clients, test: Clients, info: dict[str, JSON] | None = None) -> None:
        if isinstance(train, Mapping) and isinstance(test, Mapping):
            if alone := sorted(map(str, train.keys() ^ test.keys())):
                raise DataError(f"a partition's train and test name the same clients; one lacks {first_ten(alone)}")
            info = {**(info or {}), "names": [*map(str, train)]}
            train, test = [*train.values()], [test[name] for name in train]
        self.train, self.test, self.info = IndexLists.of(train), IndexLists.of(test), info or {}

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
        return cls(parts[0::2], parts[1::2], plain_info(dataset, "", DECLARED))

    @property
    def is_declared(self) -> bool:
        """Whether the clients hold their own data. Then only the sizes are known."""
        return self.info.get("partitioner") == DECLARED

    @property
    def names(self) -> list[str]:
        """The clients' names; without names, their numbers."""
        names: Any = self.info.get("names")
        return list(names or map(str, range(self.num_clients)))

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

        :raises DataError: the file cannot be written, or ``info`` does not name a data set to check it against.
        """
        if not {*self.info} - {"names"}:
            raise DataError("a partition without info names no data set; give it to a run, which writes partition.json")
        parts = {"train": self.train, "test": self.test}
        content: dict[str, Any] = {"format": FORMAT, "sha256": self.sha256, "info": self.info}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if sum(len(part.positions) for part in parts.values()) <= MAX_IN_JSON:
                content.update({name: [positions.tolist() for positions in part] for name, part in parts.items()})
            else:
                # Named by its content, so the file that an older JSON file names is not overwritten.
                beside = path.with_name(f"{path.stem}-{self.sha256[:16]}.safetensors")
                lists = {name: {"positions": part.positions, "offsets": part.offsets} for name, part in parts.items()}
                write_tensors(beside, flatten(lists)[0])
                content.update(format=SPLIT_FORMAT, clients=self.num_clients, file=beside.name)
            write_text(path, json.dumps(content) + "\n")
        except (OSError, StorageError) as error:
            raise DataError(f"cannot write the partition file {path}: {error}") from error


def plain_info(dataset: str, labels: str, partitioner: str) -> dict[str, JSON]:
    """Return the ``info`` of a partition that was made without options; ``labels`` is the hash of the labels."""
    return {
        "dataset": dataset,
        "labels_sha256": labels,
        "partitioner": partitioner,
        "alpha": 0.0,
        "classes_per_client": 0,
        "seed": 0,
        "client_test_fraction": 0.0,
        "notes": [],
    }


def problem_with_lists(train: IndexLists, test: IndexLists, size: int, *, shared: bool = False) -> str | None:
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
    if not len(twice):
        return None
    owners = [str(k) for k in range(len(train)) if twice[0] in train[k] or twice[0] in test[k]]
    return f"sample {twice[0]} is used more than once, by client {' and '.join(owners)}"


def labels_sha256(dataset: Dataset) -> str:
    """Return the hash of a data set's training labels, hexadecimal: a partition fits data sets with the same hash."""
    labels = dataset.train.labels.cpu().numpy()
    labels = np.ascontiguousarray(labels, dtype=labels.dtype.newbyteorder("<"))
    return hashlib.sha256(labels.data).hexdigest()


def check_partition(partition: Partition, dataset: Dataset, where: object) -> None:
    """Refuse a partition that does not belong to ``dataset``, or that no run could read again.

    :param where: the file, or another word for the partition, with which messages begin.
    :raises DataError: ``info`` is not complete, or the lists are wrong.
    :raises ConfigError: it belongs to another data set.
    """
    info: Any = partition.info
    for key, (kind, description) in _INFO.items():
        if not isinstance(info.get(key), kind) or isinstance(info.get(key), bool):
            raise DataError(f'{where}: "info" needs {key!r}, {description}, as fedcore.data.make_partition writes it')
    names = info.get("names", [])
    if not isinstance(names, list) or (names and not len(names) == len({*map(str, names)}) == partition.num_clients):
        raise DataError(f'{where}: "names" in "info" should have a name for each client, and none twice')
    texts = [info["dataset"], info["partitioner"], *info["notes"], *names]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):  # they are printed to a terminal
        raise DataError(f'{where}: names and "notes" in "info" should be printable text')
    if not partition.is_declared and info["labels_sha256"] != labels_sha256(dataset):
        raise ConfigError(
            f"{where} splits {info['dataset']!r}, whose labels differ from the labels of the {len(dataset.train)} "
            f"training samples of {dataset.name!r}: use the data set that it was made for, or make a new split"
        )
    size = sys.maxsize if partition.is_declared else len(dataset.train)
    if problem := problem_with_lists(partition.train, partition.test, size, shared=info.get("shares_samples") is True):
        raise DataError(f"{where}: {problem}")


def fitted(dataset: Dataset, partition: Partition, clients: int) -> Dataset:
    """Return the data set with its task's statistics from the training parts of the first ``clients`` clients.

    The others are unseen. Where clients hold their own data, the statistics are those of the data set's own training
    labels.
    """
    if partition.is_declared:
        return dataset
    return replace(dataset, task=dataset.task.fitted(dataset.train.labels.cpu()[partition.train.of_first(clients)]))


def load_partition(path: Path, dataset: Dataset) -> Partition:
    """Read an untrusted partition file and check that it fits ``dataset``.

    :raises DataError: the file is missing, damaged or edited.
    :raises ConfigError: it belongs to another data set.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the partition file {path}: {error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not a partition file: it is not valid JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, SPLIT_FORMAT):
        raise DataError(
            f'{path} is not a partition file: "format" should be "{FORMAT}". `fedcore data split --out` writes one; '
            "lists of your own: fedcore.run(partition=[...]), or --partition module:... (docs/your-data.md)"
        )
    info = content.get("info")
    if not isinstance(info, dict):
        raise DataError(f'{path}: "info" should be an object')
    if content["format"] == SPLIT_FORMAT:
        train, test = _read_beside(content, path)
    else:
        train, test = (_parts(content, name, path) for name in ("train", "test"))
    result = Partition(train, test, info)
    check_partition(result, dataset, path)
    if content.get("sha256") != result.sha256:
        raise DataError(
            f"{path}: the hash does not match the index lists: the file is damaged or was edited. "
            "Write it again with `fedcore data split --out`; a split of your own is a function, "
            "--partition module:NAME.FUNCTION."
        )
    return result


def _parts(content: dict[str, Any], key: str, path: Path) -> IndexLists:
    lists: Any = content.get(key)
    try:
        return IndexLists.of(lists)
    except (DataError, TypeError, ValueError) as error:
        raise DataError(f'{path}: "{key}" should be a list with one list of indices per client ({error})') from error


def _read_beside(content: dict[str, Any], path: Path) -> tuple[IndexLists, IndexLists]:
    """Return train and test from the safetensors file that a partition file names."""
    name = content.get("file")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise DataError(f'{path}: "file" should name a .safetensors file in the same folder')
    beside = path.with_name(name)
    try:
        groups = unflatten(read_tensors(beside)[0])
        train, test = (IndexLists(**groups[part]) for part in ("train", "test"))
        for part in (train, test):
            check_offsets("offsets", part.offsets, len(part.positions))
            if part.positions.ndim != 1 or part.positions.dtype not in (torch.int32, torch.int64):
                raise ValueError("positions must be int32 or int64 of shape (n,)")
    except OSError as error:
        raise DataError(f"the index lists of {path} are in {beside}, which cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, DataError) as error:
        raise DataError(f"{beside} does not hold the index lists of {path}: {error}") from error
    return train, test
