"""Versions of a client's state: written anew, kept while a checkpoint names them, whole or absent."""

from __future__ import annotations

import os

import pytest
import torch

from fedcore.base.errors import RunDirectoryError, StorageError
from fedcore.base.serial import dumps
from fedcore.base.tensors import flatten
from fedcore.client.store import ClientStore
from tests.sentences import raises
from tests.support import flipped


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


def together(store, version, clients):
    states = {client: {"p": {"n": client, "t": torch.full((9,), float(version))}} for client in clients}
    blobs = {client: dumps(*flatten(state)) for client, state in states.items()}
    store.write_together(version, {client: (blob[:40], memoryview(blob)[40:]) for client, blob in blobs.items()})
    return sorted(path.name for path in store.together.iterdir())


def test_states_that_were_written_together_are_read_one_by_one(tmp_path):
    store = ClientStore(tmp_path)
    together(store, 3, range(4))
    assert len(together(store, 3, range(4, 7))) == 2
    for reader in (store, ClientStore(tmp_path)):  # another process looks for the bundles itself
        for client in range(7):
            assert reader.has(client, 3)
            state = reader.read(client, 3)["p"]
            assert (state["n"], state["t"].tolist()) == (client, [3.0] * 9)
        assert not reader.has(7, 3)
        assert not reader.has(0, 2)
    with raises(RunDirectoryError, "7", "3"):
        store.read(7, 3)


def test_a_bundle_stays_until_no_checkpoint_names_any_of_its_states(tmp_path):
    store = ClientStore(tmp_path)
    (first,) = together(store, 0, (0, 1))
    (second,) = {*together(store, 1, (0, 2))} - {first}
    half = ".000001-0.bundle.9.tmp"
    (store.together / half).write_bytes(b"half")
    store.prune([], [{0: 1, 1: 0}], training=1)
    assert sorted(path.name for path in store.together.iterdir()) == [half, first, second], "round 1 trains"
    store.prune([], [{0: 0, 1: 0}, {0: 1, 1: 0, 2: 1}])
    assert sorted(path.name for path in store.together.iterdir()) == [first, second]
    store.prune([], [{0: 1, 1: None, 2: 1}])
    assert [path.name for path in store.together.iterdir()] == [second]
    assert not store.has(1, 0)
    assert store.read(2, 1)["p"]["n"] == 2


def test_the_bundle_is_on_the_disk_before_the_checkpoint_that_names_it(tmp_path, monkeypatch):
    store, synced = ClientStore(tmp_path), set()
    together(store, 0, (0, 1))
    bundles = together(store, 1, (2, 3))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    store.settle({2: 1, 3: 1})
    assert synced == {str(path) for path in (tmp_path, store.together, store.together / bundles[1])}


@pytest.mark.parametrize("what", ["state", "index", "cut", "empty"])
def test_a_damaged_bundle(tmp_path, what):
    """A bit of a state is lost with this client's state alone, a bit of the index with all states."""
    store = ClientStore(tmp_path)
    (name,) = together(store, 2, (5, 6))
    path = store.together / name
    content = path.read_bytes()
    damaged = {"state": flipped(content, len(content) - 3), "index": flipped(content, 15), "cut": content[:-5]}
    path.write_bytes(damaged.get(what, b""))
    store = ClientStore(tmp_path)
    assert store.has(6, 2), "whole or damaged"
    with raises(RunDirectoryError, "6", "2", f"{path}"):
        store.read(6, 2)
    if what in ("state", "cut"):
        assert store.read(5, 2)["p"]["n"] == 5
    store.prune([], [{6: 2}])
    assert path.exists()
    store.prune([], [{6: 3}])
    assert not path.exists()
