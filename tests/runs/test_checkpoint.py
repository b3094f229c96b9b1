"""Checkpoints: whole or absent, the one before is kept, and a damaged one falls back to it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fedcore.base.errors import RunDirectoryError
from fedcore.base.serial import dumps, read_tensors, write_tensors
from fedcore.client.store import ClientStore
from fedcore.runs.checkpoint import CheckpointStore
from fedcore.server.state import ServerState
from tests.sentences import raises
from tests.support import flipped


def checkpoints(tmp_path):
    """Return a store of checkpoints whose clients' states, as :func:`state` names them, are there."""
    clients = ClientStore(tmp_path / "clients")
    for client, version in ((0, 2), (12, 0)):
        clients.write(client, version, {"p": {"t": torch.ones(3)}})
    return CheckpointStore(tmp_path / "checkpoint", clients)


def state(round_=3, phase="train"):
    return ServerState(
        model={"w": torch.tensor([1.5, -0.0]), "n": torch.tensor(7)},
        round=round_,
        phase=phase,
        plugins={"moon": {"a/b": torch.ones(2), "list": [1, 2.5, None]}, "other": {"x": "y"}},
        manifest={0: 2, 5: None, 12: 0},
        ledger={"down": 3, "up": 4, "by_plugin": {"model": {"down": 3, "up": 4}}},
        best={"round": 1, "validation_accuracy": 0.1 + 0.2},
        before_correction={"accuracy": 0.25},
        metrics_bytes=123,
        virtual_time=0.1 * 3,
        stopped=True,
        outliers={"5": 9e17},
    )


class Disk:
    """What a power failure would leave: the files that were waited for, and of each folder the names it had then."""

    def __init__(self, monkeypatch):
        self.files, self.names, self.lacking = set(), {}, []
        self._replace = os.replace
        monkeypatch.setattr(os, "fsync", self.sync)
        monkeypatch.setattr(os, "replace", self.rename)

    def sync(self, descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[path] = {entry.name for entry in path.iterdir()}
        else:
            self.files.add(path)

    def rename(self, source, target):
        if re.fullmatch(r"\d{6}-\d-\w+\.safetensors", target.name):
            self.lacking.append(self.missing(target.parent, int(target.name[:6])))
        self._replace(source, target)

    def missing(self, checkpoints, rounds):
        """Return what the disk lacks of a checkpoint's folder and of the files that it refers to."""
        run = checkpoints.parent
        states = {path for path in run.glob("clients/*/*.safetensors") if int(path.stem) < rounds}  # not the next one's
        files = {run / "metrics.jsonl", *states}
        paths = {checkpoints, *files, *(folder for file in files for folder in file.parents)}
        paths -= {run.parent.parent, *run.parent.parent.parents}  # were there before
        return {path for path in paths if path.name not in self.names.get(path.parent, ())} | (states - self.files)


@pytest.mark.parametrize("plugins", [(), ("moon",)], ids=str)
def test_all_that_a_checkpoint_refers_to_is_on_the_disk_before_it(go, tmp_path, monkeypatch, plugins):
    disk = Disk(monkeypatch)
    go(*plugins, rounds=3, clients=6, participation=0.5, out=tmp_path / "runs" / "run")
    assert disk.lacking == [set()] * 4  # of three rounds and the end


@pytest.mark.parametrize("phase", ["train", "post_train", "done"])
def test_a_checkpoint_comes_back_as_it_was(tmp_path, phase):
    store = checkpoints(tmp_path)
    assert store.load() is None
    store.save(state(phase=phase))
    back, saved = store.load(), state(phase=phase)
    for field in fields(ServerState):
        if field.name not in ("model", "plugins"):
            assert getattr(back, field.name) == getattr(saved, field.name)
    assert {name: tensor.tolist() for name, tensor in back.model.items()} == {"w": [1.5, -0.0], "n": 7}
    assert back.plugins["moon"]["a/b"].tolist() == [1, 1]
    assert back.plugins["moon"]["list"] == [1, 2.5, None]
    assert back.plugins["other"] == {"x": "y"}


def names(store):
    return sorted(path.name.partition(".")[0] for path in store.root.iterdir())


def test_the_newest_counts_the_one_before_stays_and_older_ones_go(tmp_path):
    store, seen = checkpoints(tmp_path), []
    for round_, phase in ((1, "train"), (2, "train"), (2, "post_train"), (2, "post_train"), (2, "done")):
        store.save(state(round_, phase))
        assert (store.load().round, store.load().phase) == (round_, phase)
        seen.append(names(store))
    assert seen == [
        ["000001-0-train"],
        ["000001-0-train", "000002-0-train"],
        ["000002-0-train", "000002-1-post_train"],
        ["000002-0-train", "000002-1-post_train"],
        ["000002-1-post_train", "000002-2-done"],
    ]


def test_the_one_before_is_not_deleted_before_the_next_is_whole(tmp_path, monkeypatch):
    store = checkpoints(tmp_path)
    store.save(state(1))
    store.save(state(2))
    there = []
    real = os.replace

    def replace(*given):
        there.append([name for name in names(store) if name])  # without the one that is being written
        real(*given)

    monkeypatch.setattr(os, "replace", replace)
    store.save(state(3))
    assert there == [["000001-0-train", "000002-0-train"]]
    assert names(store) == ["000002-0-train", "000003-0-train"]


def test_versions_of_clients_stay_while_a_checkpoint_names_them(tmp_path):
    clients = ClientStore(tmp_path / "clients")
    store = CheckpointStore(tmp_path / "checkpoint", clients)

    def round_(number, manifest, touched=()):
        for client in touched:
            clients.write(client, number, {"p": {"n": number}})
        store.save(ServerState(model={}, round=number + 1, manifest=manifest), touched)
        return {int(f.parent.name): sorted(int(v.stem) for v in f.parent.iterdir()) for f in clients.root.glob("*/*")}

    assert round_(0, {0: 0, 1: 0}, touched=(0, 1)) == {0: [0], 1: [0]}
    assert round_(1, {0: 1, 1: 0}, touched=(0, 1)) == {0: [0, 1], 1: [0]}, "client 1's new version was not accepted"
    assert round_(2, {0: 1, 1: 2}, touched=(1,)) == {0: [1], 1: [0, 2]}
    assert round_(3, {0: 1, 1: 2}) == {0: [1], 1: [2]}
    again = CheckpointStore(store.root, clients)  # another process goes on
    assert again.load().round == 4
    store = again
    assert round_(4, {0: 4, 1: 2}, touched=(0,)) == {0: [1, 4], 1: [2]}


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-5],
    "text": lambda content: b"text" * 40,
    "a bit of a weight": lambda content: flipped(content, len(content) - 3),
    "a bit of the header": lambda content: flipped(content, content.index(b"data_offsets") - 30),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    store, said = checkpoints(tmp_path), []
    store.save(state(1))
    store.save(state(2))
    _, new = sorted(store.root.iterdir())
    new.write_bytes(DAMAGES[damage](new.read_bytes()))
    assert store.load(note=said.append).round == 1
    (sentence,) = said
    assert sentence.startswith("000002-0-train.safetensors: ")
    assert "going on from it, after 1 round" in sentence
    store.save(state(2, "post_train"))  # the damaged one is no generation of its own
    assert names(store) == ["000001-0-train", "000002-1-post_train"]
    for path in store.root.iterdir():
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with raises(RunDirectoryError, "000002", "1", "000001", "0", "--config"):
        store.load()
    assert names(store) == ["000001-0-train", "000002-1-post_train"], "a look deletes nothing"


def test_a_checkpoint_without_what_it_should_hold(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state(1))
    write_tensors(store.root / "000002-0-train.safetensors", {"model/w": torch.ones(1)}, {"round": 2})
    assert store.load().round == 1


def test_a_checkpoint_that_lacks_its_checksum_is_damaged(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state(1))
    store.save(state(2))
    path = store.root / "000002-0-train.safetensors"
    path.write_bytes(dumps(*read_tensors(path)))
    assert store.load(note=(heard := []).append).round == 1
    assert "000002-0-train" in heard[0]


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
def test_a_checkpoint_is_no_better_than_the_clients_states_it_names(tmp_path, damage):
    store, said = checkpoints(tmp_path), []
    store.clients.write(0, 7, {"p": {"round": torch.ones(3)}})
    store.save(state(1))
    newer = state(2)
    newer.manifest = {**newer.manifest, 0: 7}
    store.save(newer, touched=[0])
    path = store.clients.path(0, 7)
    path.unlink() if damage == "missing" else path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert store.load(note=said.append).round == 1
    assert "client 0's state of round 7 is lost" in said[0]
    store.clients.path(12, 0).unlink()  # both checkpoints name this one
    with raises(RunDirectoryError, "12", "0"):
        store.load()


def test_a_half_written_temporary_file_is_ignored(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state(1))
    (store.root / ".000002-0-train.safetensors.999.tmp").write_bytes(b"half")
    store.clients.write(5, 9, {"p": {"n": 1}})
    assert store.load().round == 1
    store.tidy()
    assert names(store) == ["000001-0-train"]
    assert sorted(path.parent.name for path in store.clients.root.glob("*/*")) == ["000000", "000012"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state(1))
    broken = state(2)
    broken.ledger["x"] = object()
    with pytest.raises(TypeError):
        store.save(broken)
    assert store.load().round == 1
    assert names(store) == ["000001-0-train"]


def test_a_loaded_checkpoint_does_not_hold_the_file(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state())
    back = store.load()
    back.model["w"].fill_(9)
    assert store.load().model["w"].tolist() == [1.5, -0.0]
    assert json.dumps(back.best) == json.dumps(state().best)
