"""Tensors and JSON as bytes: what was written comes back, and damage is noticed."""

from __future__ import annotations

import math
import os
import stat

import torch

from fedcore.base.serial import dumps, loads, read_tensors, write_tensors
from tests.support import flipped


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


def test_a_file_may_be_read_by_whom_any_new_file_may_be(tmp_path):
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(1)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o640


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


def test_tensors_come_in_one_order_however_they_are_read(tmp_path):
    tensors = {name: torch.zeros(number + 1) for number, name in enumerate("hbafgcde")}
    write_tensors(tmp_path / "small.safetensors", tensors, {})
    orders = {tuple(read_tensors(tmp_path / "small.safetensors")[0]) for _ in range(20)}
    orders |= {tuple(loads(dumps(tensors, {}))[0]) for _ in range(20)}
    assert len(orders) == 1
