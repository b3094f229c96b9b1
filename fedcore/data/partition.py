"""A data set divided among clients: made, hashed, written, read back and drawn."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.data.partitions import IntArray, partition, shares_samples
from fedcore.data.parts import Parts
from fedcore.data.samples import JSON, Dataset
from fedcore.errors import ConfigError, DataError, PluginContractError, StorageError
from fedcore.files import write_text
from fedcore.seeding import numpy_generator
from fedcore.serial import read_tensors, write_tensors

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "fedcore-partition-1"
SPLIT_FORMAT = "fedcore-partition-2"

DECLARED = "declared"
"""In place of a partitioner's name: the clients said themselves how much they hold."""

MAX_IN_JSON = 2_000_000
"""Most positions that stand in the JSON file itself (some 15 MB); more go into a file of tensors beside it."""

_HASHED_AT_ONCE = 1 << 20


class Partition:
    """Which training samples each client holds; compare two by ``sha256``.

    :param train: one (n_k,) int64 tensor of positions in the data set's *training* set per client.
    :param test: the same of the client's own hold-out, empty when it has none.
    :param info: how it was made: dataset, labels_sha256, partitioner, alpha, classes_per_client,
        client_test_fraction, seed, notes; ``shares_samples`` where clients may hold the same sample, ``samples``
        where only so many were dealt.
    """

    def __init__(self, train: Sequence[Tensor], test: Sequence[Tensor], info: dict[str, JSON]) -> None:
        self.train, self.test, self.info = Parts.of(train), Parts.of(test), info

    @classmethod
    def declared(cls, train: Sequence[int], test: Sequence[int], dataset: str) -> Partition:
        """Return what is known of clients that hold data of their own: how many samples, and how many held out.

        The positions count the samples and lead nowhere.

        :param train: training samples per client, at least 1 each; ``test`` held-out samples per client.
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
        """Whether the clients hold data of their own, of which only the sizes are known."""
        return self.info["partitioner"] == DECLARED

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    @property
    def sha256(self) -> str:
        """Hash of the index lists alone, in their order: hexadecimal."""
        digest = hashlib.sha256(FORMAT.encode())
        for parts in (self.train, self.test):
            for tensor in (torch.tensor([len(parts)]), parts.sizes, parts.positions):
                for block in tensor.split(_HASHED_AT_ONCE):
                    digest.update(np.ascontiguousarray(block.numpy(), dtype="<i8").data)
        return digest.hexdigest()

    def class_counts(self, labels: Tensor, num_classes: int) -> Tensor:
        """Return how many training samples of each class each client holds: (K, C) int64.

        ``labels`` (n,) int64 are those of the whole training set; the hold-out is not counted.
        """
        client = torch.repeat_interleave(torch.arange(self.num_clients), self.train.sizes)
        cell = client * num_classes + labels[self.train.positions.long()]
        return torch.bincount(cell, minlength=self.num_clients * num_classes).view(-1, num_classes)

    def save(self, path: Path) -> None:
        """Write the partition as JSON; the file is complete or not there.

        More than ``MAX_IN_JSON`` positions go into a safetensors file beside it, which the JSON file names.

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
                # Named by its content: a JSON file that was there before keeps what it names.
                beside = path.with_name(f"{path.stem}-{sha256[:16]}.safetensors")
                tensors = {f"{name}/positions": part.positions for name, part in parts.items()}
                tensors.update({f"{name}/offsets": part.offsets for name, part in parts.items()})
                write_tensors(beside, tensors)
                content.update(format=SPLIT_FORMAT, clients=self.num_clients, file=beside.name)
            write_text(path, json.dumps(content) + "\n")
        except (OSError, StorageError) as error:
            raise DataError(f"cannot write the partition file {path}: {error}") from error


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
) -> Partition:
    """Divide the training set of ``dataset`` among ``clients`` and set each one's hold-out aside.

    The hold-out is ``client_test_fraction`` (in [0, 1)) of the client's samples, drawn class by class; a
    class of which the client has one sample stays in training, so a client always keeps some.

    :param samples: deal at most so many samples, each class with its share of them; None deals all.
    :raises ConfigError: numbers that cannot work.
    :raises PluginContractError: the partitioner returned something other than disjoint, non-empty parts.
    """
    if not 0 <= client_test_fraction < 1:
        raise ConfigError(f"client_test_fraction must be in [0, 1), not {client_test_fraction}")
    labels = dataset.train.labels.cpu().numpy()
    dealt = _drawn(labels, samples, seed)
    parts, notes = partition(partitioner, labels[dealt], clients, alpha, seed, classes_per_client=classes_per_client)
    train, test, shared = Parts.of(parts), Parts.empty(len(parts)), shares_samples(partitioner)
    problem = _problem(train, test, len(dealt), shared=shared)
    if problem or len(parts) != clients:
        problem = problem or f"{len(parts)} parts for {clients} clients"
        raise PluginContractError(f"partitioner {partitioner!r} returned a bad partition: {problem}")
    if samples is not None:
        train = Parts(torch.from_numpy(dealt).to(train.positions.dtype)[train.positions.long()], train.offsets)
    if client_test_fraction and shared:
        raise ConfigError(f"client_test_fraction must be 0: by {partitioner!r} others train on what one holds out")
    if client_test_fraction:
        train, test = _hold_out(train, labels, client_test_fraction, seed)
    info: dict[str, JSON] = {
        "dataset": dataset.name,
        "labels_sha256": _labels_sha256(dataset),
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
        info["samples"] = len(dealt)
    return Partition(train, test, info)


def load_partition(path: Path, dataset: Dataset) -> Partition:
    """Read a partition file, which may come from a stranger, and check that it fits ``dataset``.

    :raises DataError: the file is missing, damaged or was changed by hand.
    :raises ConfigError: it belongs to another data set.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise DataError(f"cannot read the partition file {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a partition file: it is not valid JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, SPLIT_FORMAT):
        raise DataError(
            f'{path} is not a partition file: "format" should be "{FORMAT}". `fedcore data split` writes one.'
        )
    info = content.get("info")
    if not isinstance(info, dict):
        raise DataError(f'{path}: "info" should be an object')
    for key, (kind, what) in _INFO.items():
        if not isinstance(info.get(key), kind) or isinstance(info.get(key), bool):
            raise DataError(f'{path}: "info" needs {key!r}, {what}')
    texts = [info["dataset"], info["partitioner"], *info["notes"]]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):  # they go to a terminal
        raise DataError(f'{path}: names and "notes" in "info" should be printable text')
    declared = info["partitioner"] == DECLARED
    if not declared and info["labels_sha256"] != _labels_sha256(dataset):
        raise ConfigError(
            f"{path} divides {info['dataset']!r}, and its labels are not those of the {len(dataset.train)} "
            f"training samples of {dataset.name!r}: give the data set it was made for, or make a new split"
        )
    size = sys.maxsize if declared else len(dataset.train)
    if content["format"] == SPLIT_FORMAT:
        train, test = _read_beside(content, size, path)
    else:
        train, test = (_parts(content, name, size, path) for name in ("train", "test"))
    result = Partition(train, test, info)
    problem = _problem(train, test, size, shared=info.get("shares_samples") is True)
    if problem:
        raise DataError(f"{path}: {problem}")
    if content.get("sha256") != result.sha256:
        raise DataError(
            f"{path}: the hash does not match the index lists, so the file is damaged or was edited. "
            "Make it again with `fedcore data split`."
        )
    return result


def draw_table(partition: Partition, labels: Tensor, num_classes: int) -> Table:
    """Return the clients-by-classes table of training counts, its cells shaded by count.

    Of more than 40 clients the first 20 and the last 5 are shown; of more than 26 classes neighbours share a
    column. The rows below the line are over all clients.
    """
    from rich.table import Table
    from rich.text import Text

    counts = partition.class_counts(labels, num_classes)
    width = math.ceil(num_classes / _MAX_COLUMNS)
    groups = [range(first, min(first + width, num_classes)) for first in range(0, num_classes, width)]
    cells = torch.stack([counts[:, group.start : group.stop].sum(dim=1) for group in groups], dim=1)
    largest = max(1, int(cells.max()))
    sizes, held_out = counts.sum(dim=1), partition.test.sizes

    table = Table(
        # Text, not str: names from a file must not be read as rich's markup.
        title=Text(
            f"{partition.info.get('dataset', '')} by {partition.info.get('partitioner', '')}, "
            f"{partition.num_clients} clients: training samples per class"
        ),
        caption=f"sha256 {partition.sha256}",
    )
    table.add_column("client")
    for group in groups:
        name = f"{group.start}-{group.stop - 1}" if len(group) > 1 else str(group.start)
        table.add_column(name, justify="right")
    table.add_column("classes", justify="right")
    table.add_column("train", justify="right")
    table.add_column("held out", justify="right")

    def add(client: int) -> None:
        shaded = [Text(str(n) if n else "", style=_shade(n / largest)) for n in cells[client].tolist()]
        numbers = (int((counts[client] > 0).sum()), int(sizes[client]), int(held_out[client]))
        table.add_row(str(client), *shaded, *map(str, numbers))

    everybody = range(partition.num_clients)
    if len(everybody) <= _MAX_ROWS:
        shown, rest = everybody, everybody[:0]
    else:
        shown, rest = everybody[:_FIRST_ROWS], everybody[-_LAST_ROWS:]
    for client in shown:
        add(client)
    if rest:
        table.add_row(*["…"] * len(table.columns))
    for client in rest:
        add(client)
    table.add_section()
    everything = torch.cat([cells, torch.stack([(counts > 0).sum(dim=1), sizes, held_out], dim=1)], dim=1)
    for name, row in (
        ("smallest", everything.min(dim=0).values),
        ("median", everything.median(dim=0).values),
        ("largest", everything.max(dim=0).values),
    ):
        table.add_row(name, *map(str, row.tolist()))
    total = everything.sum(dim=0).tolist()
    total[len(groups)] = int((counts.sum(dim=0) > 0).sum())
    table.add_row("total", *map(str, total))
    return table


_MAX_COLUMNS = 26
_MAX_ROWS, _FIRST_ROWS, _LAST_ROWS = 40, 20, 5
_INFO: dict[str, tuple[type | tuple[type, ...], str]] = {
    "dataset": (str, "a name"),
    "labels_sha256": (str, "the hash of the data set's labels"),
    "partitioner": (str, "a name"),
    "alpha": ((int, float), "a number"),
    "classes_per_client": (int, "an integer"),
    "client_test_fraction": ((int, float), "a number"),
    "seed": (int, "an integer"),
    "notes": (list, "a list of strings"),
}


def _shade(share: float) -> str:
    """Return a rich style for a count of ``share`` (0..1) of the largest; square root lifts small counts."""
    if not share:
        return ""
    level = int(235 - 175 * math.sqrt(share))
    return f"{'black' if level > 140 else 'white'} on rgb({level // 2},{level},{min(255, level + 40)})"


def _drawn(labels: IntArray, samples: int | None, seed: int) -> IntArray:
    """Return the positions that are dealt, ascending: all, or ``samples`` of them drawn class by class."""
    if samples is None or samples == len(labels):
        return np.arange(len(labels))
    if samples > len(labels):
        raise ConfigError(f"--samples is {samples}, but the data set has {len(labels)} training samples")
    return np.flatnonzero(_draw_by_class(labels, samples / len(labels), numpy_generator(seed, "samples")))


def _hold_out(train: Parts, labels: IntArray, fraction: float, seed: int) -> tuple[Parts, Parts]:
    """Set part of every client's samples aside; returns what stays for training, and the hold-outs."""
    kept, held_out = [], []
    for client, indices in enumerate(train):
        rng = numpy_generator(seed, "holdout", client=client)
        mask = torch.from_numpy(_draw_by_class(labels[indices.numpy()], fraction, rng))
        kept.append(indices[~mask])
        held_out.append(indices[mask])
    return Parts.of(kept), Parts.of(held_out)


def _draw_by_class(labels: IntArray, fraction: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return which of ``labels``, (n,) bool, make up a fraction of them.

    Each class gives its share rounded down; what is missing to the share of the whole is taken one each from
    the classes with the largest remainders. No class gives its last sample.
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


def _labels_sha256(dataset: Dataset) -> str:
    labels = np.ascontiguousarray(dataset.train.labels.cpu().numpy(), dtype="<i8")
    return hashlib.sha256(labels.data).hexdigest()


def _parts(content: dict[str, Any], key: str, size: int, path: Path) -> Parts:
    lists = content.get(key)
    if not isinstance(lists, list):
        raise DataError(f'{path}: "{key}" should be a list with one list of indices per client')
    for client, indices in enumerate(lists):
        # type() and not isinstance: true and false are integers to Python.
        if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < size for i in indices):
            raise DataError(f'{path}: "{key}" of client {client} should be a list of indices 0..{size - 1}')
    return Parts.of(lists)


def _read_beside(content: dict[str, Any], size: int, path: Path) -> tuple[Parts, Parts]:
    """Return train and test from the file of tensors that a partition file names; they stay on the disk."""
    name = content.get("file")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise DataError(f'{path}: "file" should name a .safetensors file in the same folder')
    beside = path.with_name(name)
    try:
        tensors, _ = read_tensors(beside)
        parts = [Parts(tensors[f"{part}/positions"], tensors[f"{part}/offsets"]) for part in ("train", "test")]
    except OSError as error:
        raise DataError(f"{path} has its index lists in {beside}, which cannot be read: {error}") from error
    except (ValueError, KeyError) as error:
        raise DataError(f"{beside} does not hold the index lists of {path}: {error}") from error
    for part in parts:
        problem = part.problem()
        if problem:
            raise DataError(f"{beside}: {problem}")
    train, test = parts
    return train, test


def _problem(train: Parts, test: Parts, size: int, *, shared: bool = False) -> str | None:
    """Return what is wrong with a partition of ``size`` samples, or None.

    :param shared: whether clients may hold the same sample.
    """
    if not len(train):
        return "there are no clients"
    if len(train) != len(test):
        return f"training lists of {len(train)} clients, but hold-out lists of {len(test)}"
    without = (train.sizes == 0).nonzero()
    if len(without):
        return f"client {int(without[0])} has no training samples"
    for positions in (part.positions for part in (train, test) if len(part.positions)):
        if int(positions.min()) < 0 or int(positions.max()) >= size:
            return f"there are indices outside 0..{size - 1}"
    if shared:
        return "clients share samples, so none can be held out" if len(test.positions) else None
    ordered = torch.cat([train.positions, test.positions]).sort().values
    twice = ordered[1:][ordered.diff() == 0]
    return f"sample {int(twice[0])} is used more than once" if len(twice) else None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
