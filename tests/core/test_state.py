"""State: copies on reading, versions, checkpoints that are whole or absent."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.errors import PluginContractError, RunDirectoryError
from fedcore.serial import dumps, loads, read_tensors, write_tensors
from fedcore.state import CheckpointStore, ClientStore, ServerState, State, States, flatten, unflatten


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
    state = State(base, read_only="answer")
    with pytest.raises(PluginContractError, match="read-only in answer"):
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


def test_prune_keeps_what_the_checkpoint_names(tmp_path):
    store = ClientStore(tmp_path)
    for client in (0, 1, 2):
        for version in (0, 1, 2):
            store.write(client, version, {"p": {"n": version}})
    store.settle({0: 1, 1: None})
    store.prune({0: 1, 1: None})
    assert [path.name for path in sorted((tmp_path / "000000").iterdir())] == ["000001.safetensors"]
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
    with pytest.raises(OSError, match="disk full"):
        store.write(0, 1, {"p": {"n": 2}})
    monkeypatch.undo()
    assert store.read(0, 1) == {"p": {"n": 1}}
    assert [path.name for path in (tmp_path / "000000").iterdir()] == ["000001.safetensors"]


# --- checkpoints -----------------------------------------------------------------------------------------


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
    store = CheckpointStore(tmp_path / "checkpoint")
    assert store.load() is None
    store.save(state(phase=phase))
    back, saved = store.load(), state(phase=phase)
    for field in ("round", "phase", "manifest", "ledger", "best", "metrics_bytes"):
        assert getattr(back, field) == getattr(saved, field)
    assert {name: tensor.tolist() for name, tensor in back.model.items()} == {"w": [1.5, -0.0], "n": 7}
    assert back.plugins["moon"]["a/b"].tolist() == [1, 1]
    assert back.plugins["moon"]["list"] == [1, 2.5, None]
    assert back.plugins["other"] == {"x": "y"}


def test_the_newest_counts_and_older_ones_go(tmp_path):
    store = CheckpointStore(tmp_path)
    for round_, phase in ((1, "train"), (2, "train"), (2, "post_train"), (2, "done")):
        store.save(state(round_, phase))
        assert (store.load().round, store.load().phase) == (round_, phase)
        assert len(list(tmp_path.iterdir())) == 1


def two_checkpoints(store, tmp_path):
    store.save(state(1))
    old = next(tmp_path.iterdir())
    content = old.read_bytes()
    store.save(state(2))
    new = next(tmp_path.iterdir())
    old.write_bytes(content)  # as if killed between the new file and the deletion of the old one
    return old, new


def test_two_checkpoints_after_a_kill(tmp_path):
    store = CheckpointStore(tmp_path)
    two_checkpoints(store, tmp_path)
    assert store.load().round == 2


@pytest.mark.parametrize("damage", [b"", b"text" * 40, "cut", "meta"], ids=["empty", "text", "cut", "meta"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    old, new = two_checkpoints(store, tmp_path)
    content = new.read_bytes()
    if damage == "meta":
        write_tensors(new, {"model/w": torch.ones(1)}, {"round": 2})
    else:
        new.write_bytes(content[:-5] if damage == "cut" else damage)
    assert store.load().round == 1
    old.unlink()
    with pytest.raises(RunDirectoryError, match=r"no checkpoint in .* is whole.*000002"):
        store.load()


def test_a_half_written_temporary_file_is_ignored(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(1))
    (tmp_path / ".000002-0-train.safetensors.999.tmp").write_bytes(b"half")
    assert store.load().round == 1
    store.clear()
    assert store.load() is None


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(1))
    broken = state(2)
    broken.ledger["x"] = object()
    with pytest.raises(TypeError):
        store.save(broken)
    assert store.load().round == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_loaded_checkpoint_does_not_hold_the_file(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state())
    back = store.load()
    back.model["w"].fill_(9)
    assert store.load().model["w"].tolist() == [1.5, -0.0]
    assert json.dumps(back.best) == json.dumps(state().best)
