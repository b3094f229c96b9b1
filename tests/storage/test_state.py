"""State: copies on reading, versions, checkpoints that are whole or absent."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.base.errors import PluginContractError, RunDirectoryError, StorageError
from fedcore.runs.checkpoint import CheckpointStore
from fedcore.server.state import ServerState
from fedcore.storage import serial
from fedcore.storage.client_store import ClientStore
from fedcore.storage.serial import dumps, loads, read_tensors, write_tensors
from fedcore.storage.state import State, States, flatten, unflatten


def test_reading_gives_a_copy():
    base = {"t": torch.zeros(2), "list": [1, {"a": 2}]}
    state = State(base)
    state["t"].add_(1)
    state["list"][1]["a"] = 3
    assert base["t"].tolist() == [0, 0]
    assert base["list"] == [1, {"a": 2}]
    assert state["t"].tolist() == [1, 1], "an edit in place must reach the next version"
    kept = state.values_to_keep()
    assert kept["t"].tolist() == [1, 1]
    assert kept["list"] == [1, {"a": 3}]


def test_writing_copies_and_detaches():
    tensor = torch.zeros(2, requires_grad=True)
    state = State()
    state["t"] = tensor
    with torch.no_grad():
        tensor.add_(1)
    assert state["t"].tolist() == [0, 0]
    assert not state["t"].requires_grad


def test_mapping():
    state = State({"a": 1, "b": 2})
    state["c"] = 3
    del state["a"]
    assert dict(state) == {"b": 2, "c": 3}
    assert len(state) == 2
    assert "a" not in state
    with pytest.raises(KeyError):
        state["a"]
    with pytest.raises(KeyError):
        del state["a"]
    assert state.pop("b") == 2
    assert state.values_to_keep() == {"c": 3}


def test_read_only():
    base = {"t": torch.zeros(1), "n": 1}
    state = State(base, plugin="moon", read_only="answer")
    with pytest.raises(PluginContractError, match=r"plugin 'moon' changes state\['n'\], but .* read-only in answer"):
        state["n"] = 2
    with pytest.raises(PluginContractError, match="read-only in answer"):
        del state["n"]
    state["t"].add_(1)
    assert state.values_to_keep()["t"].tolist() == [0]


@pytest.mark.parametrize("value", [object(), {1}, b"x", {"a": torch.zeros(1)}, [torch.zeros(1)]], ids=range(5))
def test_what_is_no_json(value):
    with pytest.raises(PluginContractError, match=r"state\['x'\]"):
        State()["x"] = value


def test_namespaces_and_snapshot():
    states = States({"one": {"n": 1}, "two": {"t": torch.ones(1)}})
    states.of("one")["n"] = 2
    del states.of("two")["t"]
    states.of("three")["x"] = [1]
    assert states.of("one") is states.of("one")
    assert states.snapshot() == {"one": {"n": 2}, "three": {"x": [1]}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
keys = st.text(min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from(["one", "two"]), st.dictionaries(keys, json_values | st.just("tensor"), max_size=4))
)
def test_flatten_and_back(namespaces):
    given_ = {
        plugin: {key: torch.arange(3) if value == "tensor" else value for key, value in values.items()}
        for plugin, values in namespaces.items()
        if values
    }
    tensors, rest = flatten(given_)
    tensors, rest = loads(dumps(tensors, rest))
    back = unflatten(tensors, rest)
    assert {plugin: set(values) for plugin, values in back.items()} == {p: set(v) for p, v in given_.items()}
    for plugin, values in given_.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(back[plugin][key], value)
            else:
                assert back[plugin][key] == value


def test_awkward_tensors_survive(tmp_path):
    base = torch.arange(6.0).view(2, 3)
    tensors = {
        "transposed": base.T,
        "shared": base,
        "view": base[1:],
        "empty": torch.zeros(0, 3),
        "empty too": torch.zeros(0),
        "scalar": torch.tensor(1.5),
        "odd": torch.tensor([math.nan, math.inf, -0.0]),
        "bool": torch.tensor([True, False]),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
    }
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors, {"ä": [1, None]})
    for back, meta in (read_tensors(path), loads(dumps(tensors, {"ä": [1, None]}))):
        assert meta == {"ä": [1, None]}
        assert sorted(back) == sorted(tensors)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype
            torch.testing.assert_close(back[name], tensor.contiguous(), rtol=0, atol=0, equal_nan=True)


# --- versions of clients ---------------------------------------------------------------------------------


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
    with pytest.raises(RunDirectoryError, match="client 7's state of round 2 is lost"):
        store.read(7, 2)


def test_a_half_written_version_is_no_version(tmp_path, monkeypatch):
    import safetensors.torch

    store = ClientStore(tmp_path)
    store.write(0, 1, {"p": {"n": 1}})

    def fail(tensors, path, meta):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(StorageError, match=r"cannot write .*000001.safetensors: disk full"):
        store.write(0, 1, {"p": {"n": 2}})
    monkeypatch.undo()
    assert store.read(0, 1) == {"p": {"n": 1}}
    assert [path.name for path in (tmp_path / "000000").iterdir()] == ["000001.safetensors"]


# --- checkpoints -----------------------------------------------------------------------------------------


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
        metrics_bytes=123,
    )


@pytest.mark.parametrize("phase", ["train", "post_train", "done"])
def test_a_checkpoint_comes_back_as_it_was(tmp_path, phase):
    store = checkpoints(tmp_path)
    assert store.load() is None
    store.save(state(phase=phase))
    back, saved = store.load(), state(phase=phase)
    for field in ("round", "phase", "manifest", "ledger", "best", "metrics_bytes"):
        assert getattr(back, field) == getattr(saved, field)
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
    real = serial.safetensors.torch.save_file
    monkeypatch.setattr(
        serial.safetensors.torch, "save_file", lambda *given: (there.append(names(store)), real(*given))
    )
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


def flipped(content, position, bit=0):
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    store, said = checkpoints(tmp_path), []
    store.save(state(1))
    store.save(state(2))
    _, new = sorted(store.root.iterdir())
    new.write_bytes(DAMAGES[damage](new.read_bytes()))
    assert store.load(report=said.append).round == 1
    (sentence,) = said
    assert sentence.startswith("000002-0-train.safetensors: ")
    assert "going on from it, after 1 round" in sentence
    store.save(state(2, "post_train"))  # the damaged one is no generation of its own
    assert names(store) == ["000001-0-train", "000002-1-post_train"]
    for path in store.root.iterdir():
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(RunDirectoryError, match=r"no checkpoint in .*000002-1.*000001-0.*fedcore train --config"):
        store.load()
    assert names(store) == ["000001-0-train", "000002-1-post_train"], "a look deletes nothing"


def test_a_checkpoint_without_what_it_should_hold(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state(1))
    write_tensors(store.root / "000002-0-train.safetensors", {"model/w": torch.ones(1)}, {"round": 2})
    assert store.load().round == 1


@pytest.mark.parametrize("time", [10**400, -1.0, "soon", [1]])
def test_a_clock_that_stands_nowhere_makes_a_checkpoint_damaged(tmp_path, time):
    store = checkpoints(tmp_path)
    store.save(state(1))
    (path,) = store.root.iterdir()
    tensors, meta = read_tensors(path)
    later = {"round": 2, "virtual_time": time}
    write_tensors(store.root / "000002-0-train.safetensors", tensors, {**meta, **later})
    heard = []
    assert store.load(report=heard.append).round == 1
    assert "000002-0-train" in heard[0]


def test_any_bit_that_is_flipped_is_noticed_or_means_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors, meta = {"a/w": torch.tensor([1.5, -2.0]), "n": torch.tensor([3, 4], dtype=torch.int16)}, {"round": 12}
    write_tensors(path, tensors, meta)
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            path.write_bytes(flipped(content, position, bit))
            try:
                back, said = read_tensors(path)
            except ValueError:
                continue
            assert said == meta
            assert {name: (t.dtype, t.tolist()) for name, t in back.items()} == {
                name: (t.dtype, t.tolist()) for name, t in tensors.items()
            }


def test_files_without_a_checksum_are_read(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state())
    (path,) = store.root.iterdir()
    tensors, meta = read_tensors(path)
    write_tensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, meta, checksum=False)
    assert b"sha256" not in path.read_bytes()
    assert store.load().ledger == state().ledger


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
    assert store.load(report=said.append).round == 1
    assert "client 0's state of round 7 is lost" in said[0]
    store.clients.path(12, 0).unlink()  # both checkpoints name this one
    with pytest.raises(RunDirectoryError, match=r"no checkpoint .* client 12's state of round 0 is lost"):
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
    store.clear()
    assert store.load() is None


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


def test_tensors_come_in_one_order_however_they_are_read(tmp_path, monkeypatch):
    tensors = {name: torch.zeros(number + 1) for number, name in enumerate("hbafgcde")}
    write_tensors(tmp_path / "small.safetensors", tensors, {})
    orders = {tuple(read_tensors(tmp_path / "small.safetensors")[0]) for _ in range(20)}
    orders |= {tuple(loads(dumps(tensors, {}))[0]) for _ in range(20)}
    monkeypatch.setattr("fedcore.storage.serial._MAPPED", 0)
    orders.add(tuple(read_tensors(tmp_path / "small.safetensors")[0]))
    assert len(orders) == 1
