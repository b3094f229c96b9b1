"""Versions of a client's state: written anew, kept while a checkpoint names them, whole or absent."""

from __future__ import annotations

import os

import pytest
import torch

from fedcore.base.errors import RunDirectoryError, StorageError
from fedcore.client.store import ClientStore
from tests.sentences import raises


def test_versions(tmp_path):
    store = ClientStore(tmp_path)
    assert store.read(3, None) == {}
    assert store.write(3, 0, {"p": {"n": 0}}) == 0
    assert store.write(3, 4, {"p": {"n": 4, "t": torch.ones(2)}}) == 4
    assert store.read(3, 0) == {"p": {"n": 0}}
    assert store.read(3, 4)["p"]["n"] == 4
    assert store.write(3, 5, {}) is None, "an empty state takes no file"
    assert not store.path(3, 5).exists()


def test_prune_keeps_what_the_checkpoints_name(tmp_path):
    store = ClientStore(tmp_path)
    for client in (0, 1, 2):
        for version in (0, 1, 2):
            store.write(client, version, {"p": {"n": version}})
    (tmp_path / "000000" / ".000002.safetensors.99.tmp").write_bytes(b"half")
    store.settle({0: 1, 1: None})
    store.prune([0, 1], [{0: 0, 1: None}, {0: 1, 1: None}])
    assert sorted(path.name for path in (tmp_path / "000000").iterdir()) == ["000000.safetensors", "000001.safetensors"]
    store.prune([0], [{0: 1}])
    assert [path.name for path in (tmp_path / "000000").iterdir()] == ["000001.safetensors"]
    assert list((tmp_path / "000001").iterdir()) == []
    assert len(list((tmp_path / "000002").iterdir())) == 3
    assert store.read(0, 1) == {"p": {"n": 1}}


def test_prune_leaves_what_clients_may_be_writing(tmp_path):
    """The checkpoint of a round is written while the next one trains; also a file that is being written."""
    store = ClientStore(tmp_path)
    for version in (0, 1, 2):
        store.write(0, version, {"p": {"n": version}})
    in_progress = [".000002.safetensors.9.tmp"]
    for name in [".000001.safetensors.9.tmp", *in_progress]:
        (tmp_path / "000000" / name).write_bytes(b"half")
    store.prune([0], [{0: 1}], training=2)
    left = sorted(path.name for path in (tmp_path / "000000").iterdir())
    assert left == [*in_progress, "000001.safetensors", "000002.safetensors"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text"])
def test_a_lost_version(tmp_path, damage):
    store = ClientStore(tmp_path)
    store.write(7, 2, {"p": {"t": torch.ones(100)}})
    path = store.path(7, 2)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[:-50], "text": b"no tensors" * 20}[damage])
    with raises(RunDirectoryError, "7", "2"):
        store.read(7, 2)


def test_a_half_written_version_is_no_version(tmp_path, monkeypatch):
    store = ClientStore(tmp_path)
    store.write(0, 1, {"p": {"n": 1}})

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with raises(StorageError):
        store.write(0, 1, {"p": {"n": 2}})
    monkeypatch.undo()
    assert store.read(0, 1) == {"p": {"n": 1}}
    assert [path.name for path in (tmp_path / "000000").iterdir()] == ["000001.safetensors"]
