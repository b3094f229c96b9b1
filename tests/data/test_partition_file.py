"""Partitions as files: written, read back, damaged, and of unknown origin."""

import json

import numpy as np
import pytest
import torch

from fedcore.base.errors import ConfigError, DataError, FedcoreError
from fedcore.data import Partition, load_partition
from tests.data.labelled import DATASET, make_dataset, partitioned
from tests.sentences import raises


def test_saved_and_loaded_again(tmp_path):
    partition = partitioned()
    path = tmp_path / "new" / "split.json"
    partition.save(path)
    again = load_partition(path, DATASET)
    assert again.sha256 == partition.sha256
    assert again.info == partition.info
    assert again.train[0].dtype == torch.int64
    assert [p.name for p in path.parent.iterdir()] == ["split.json"]
    assert load_partition(path, make_dataset(name="renamed")).sha256 == partition.sha256


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "split.json"
    partitioned().save(path)
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with raises(DataError):
        partitioned(seed=9).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["split.json"]


def test_a_partition_of_unknown_origin_is_saved_by_a_run(tmp_path):
    partition = partitioned()
    with raises(DataError):
        Partition(partition.train, partition.test).save(tmp_path / "split.json")
    assert not list(tmp_path.iterdir())


def test_reports_are_kept_as_notes():
    assert any("lowered" in note for note in partitioned(make_dataset(45)).info["notes"])


@pytest.mark.parametrize("other", [make_dataset(599), make_dataset(601), make_dataset(seed=1)])
def test_another_data_set_is_refused(tmp_path, other):
    partitioned().save(tmp_path / "split.json")
    with raises(ConfigError):
        load_partition(tmp_path / "split.json", other)


def edit(content, *keys, value):
    *path, last = keys
    for key in path:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (["format"], "other", ()),
        (["sha256"], "0" * 64, ()),
        (["sha256"], None, ()),
        (["info"], [], ()),
        (["info", "notes"], [1], ()),
        (["info", "notes"], ["\x1b[2J"], ()),
        (["info", "dataset"], None, ()),
        (["train"], {}, ()),
        (["train"], None, ()),
        (["train"], [], ()),
        (["train", 0], 5, ("0",)),
        (["train", 0], [], ("0",)),
        (["train", 0, 0], 600, ("0",)),
        (["train", 0, 0], -1, ("0",)),
        (["train", 0, 0], 10**30, ("0",)),
        (["train", 0, 0], 1.0, ("0",)),
        (["train", 0, 0], True, ("0",)),
        (["train", 0, 0], [1], ()),
        (["test"], [], ()),
        (["test", 3], None, ("3",)),
    ],
)
def test_edited_files_are_refused_with_a_reason(tmp_path, keys, value, named):
    path = tmp_path / "split.json"
    partitioned().save(path)
    content = json.loads(path.read_text())
    edit(content, *keys, value=value)
    path.write_text(json.dumps(content))
    with raises(DataError, *named):
        load_partition(path, DATASET)


@pytest.mark.parametrize("where", ["train", "test"])
def test_a_sample_used_twice_is_named(tmp_path, where):
    path = tmp_path / "split.json"
    partitioned().save(path)
    content = json.loads(path.read_text())
    content[where][0].append(content["train"][1][0])
    path.write_text(json.dumps(content))
    with raises(DataError, content["train"][1][0]):
        load_partition(path, DATASET)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"format": NaN}',
        b'{"format": ' + b"9" * 10_000 + b"}",
        b'{"format": "fedcore-partition-1"}',
    ],
)
def test_strange_files_are_refused_without_a_crash(tmp_path, content):
    path = tmp_path / "split.json"
    path.write_bytes(content)
    with raises(DataError, path):
        load_partition(path, DATASET)


def test_missing_and_unreadable_files(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with raises(DataError):
            load_partition(path, DATASET)


def test_a_damaged_byte_is_always_noticed(tmp_path):
    path = tmp_path / "split.json"
    partition = partitioned(make_dataset(40), clients=3)
    partition.save(path)
    content = path.read_bytes()
    start = content.index(b'"train"')
    rng = np.random.default_rng(0)
    for position in rng.integers(start, len(content) - 1, 200):
        damaged = bytearray(content)
        damaged[position] = rng.integers(33, 127)
        path.write_bytes(damaged)
        try:
            assert load_partition(path, make_dataset(40)).sha256 == partition.sha256
        except FedcoreError:
            continue
