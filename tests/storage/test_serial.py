"""Tensors and JSON as bytes: what was written comes back, and damage is noticed."""

from __future__ import annotations

import math

import torch

from fedcore.runs.checkpoint import CheckpointStore
from fedcore.server.state import ServerState
from fedcore.storage.client_store import ClientStore
from fedcore.storage.serial import dumps, loads, read_tensors, write_tensors


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


def flipped(content, position, bit=0):
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


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


def test_tensors_come_in_one_order_however_they_are_read(tmp_path, monkeypatch):
    tensors = {name: torch.zeros(number + 1) for number, name in enumerate("hbafgcde")}
    write_tensors(tmp_path / "small.safetensors", tensors, {})
    orders = {tuple(read_tensors(tmp_path / "small.safetensors")[0]) for _ in range(20)}
    orders |= {tuple(loads(dumps(tensors, {}))[0]) for _ in range(20)}
    monkeypatch.setattr("fedcore.storage.serial._MAPPED", 0)
    orders.add(tuple(read_tensors(tmp_path / "small.safetensors")[0]))
    assert len(orders) == 1
