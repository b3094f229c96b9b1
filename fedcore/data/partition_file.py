"""Read and check a partition file; the file is untrusted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedcore.base.errors import ConfigError, DataError
from fedcore.base.serial import read_tensors
from fedcore.data.dataset import Dataset
from fedcore.data.index_lists import IndexLists
from fedcore.data.partition import DECLARED, FORMAT, SPLIT_FORMAT, TENSORS, Partition, labels_sha256, problem_with

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


def load_partition(path: Path, dataset: Dataset) -> Partition:
    """Read an untrusted partition file and check that it fits ``dataset``.

    :raises DataError: the file is missing, damaged or edited.
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
            f'{path} is not a partition file: "format" should be "{FORMAT}". `fedcore data split --out` writes one.'
        )
    info = content.get("info")
    if not isinstance(info, dict):
        raise DataError(f'{path}: "info" should be an object')
    for key, (kind, what) in _INFO.items():
        if not isinstance(info.get(key), kind) or isinstance(info.get(key), bool):
            raise DataError(f'{path}: "info" needs {key!r}, {what}')
    texts = [info["dataset"], info["partitioner"], *info["notes"]]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):  # they are printed to a terminal
        raise DataError(f'{path}: names and "notes" in "info" should be printable text')
    declared = info["partitioner"] == DECLARED
    if not declared and info["labels_sha256"] != labels_sha256(dataset):
        raise ConfigError(
            f"{path} splits {info['dataset']!r}, whose labels differ from the labels of the {len(dataset.train)} "
            f"training samples of {dataset.name!r}: use the data set that it was made for, or make a new split"
        )
    size = sys.maxsize if declared else len(dataset.train)
    if content["format"] == SPLIT_FORMAT:
        train, test = _read_beside(content, path)
    else:
        train, test = (_parts(content, name, size, path) for name in ("train", "test"))
    result = Partition(train, test, info)
    problem = problem_with(train, test, size, shared=info.get("shares_samples") is True)
    if problem:
        raise DataError(f"{path}: {problem}")
    if content.get("sha256") != result.sha256:
        raise DataError(
            f"{path}: the hash does not match the index lists: the file is damaged or was edited. "
            "Write it again with `fedcore data split --out`; a split of your own is a function, "
            "--partition module:NAME.FUNCTION."
        )
    return result


def _parts(content: dict[str, Any], key: str, size: int, path: Path) -> IndexLists:
    lists = content.get(key)
    if not isinstance(lists, list):
        raise DataError(f'{path}: "{key}" should be a list with one list of indices per client')
    for client, indices in enumerate(lists):
        # type() and not isinstance: true and false are integers to Python.
        if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < size for i in indices):
            raise DataError(f'{path}: "{key}" of client {client} should be a list of indices 0..{size - 1}')
    return IndexLists.of(lists)


def _read_beside(content: dict[str, Any], path: Path) -> tuple[IndexLists, IndexLists]:
    """Return train and test from the safetensors file that a partition file names."""
    name = content.get("file")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise DataError(f'{path}: "file" should name a .safetensors file in the same folder')
    beside = path.with_name(name)
    try:
        tensors, _ = read_tensors(beside)
        train, test = (IndexLists(tensors[positions], tensors[offsets]) for positions, offsets in TENSORS.values())
    except OSError as error:
        raise DataError(f"the index lists of {path} are in {beside}, which cannot be read: {error}") from error
    except (ValueError, KeyError) as error:
        raise DataError(f"{beside} does not hold the index lists of {path}: {error}") from error
    for part in (train, test):
        problem = part.problem()
        if problem:
            raise DataError(f"{beside}: {problem}")
    return train, test


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
