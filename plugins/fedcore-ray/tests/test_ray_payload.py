"""Tensors and JSON as bytes in shared memory: what comes out is what went in, and lies where it lay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore.engines import loads
from fedcore_ray.payload import DTYPES, pack, view

META = {"text": "ü", "numbers": [1, 0.1, None], "large": 2**60}


def drawn(dtype):
    bits = torch.randint(0, 2, (6, 8), generator=torch.Generator().manual_seed(0))
    return bits.to(torch.bool) if dtype == torch.bool else bits.to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_that_safetensors_writes_is_read(dtype):
    tensor = drawn(dtype)
    found, meta = view(pack({"x": tensor}, META))
    assert found["x"].dtype == dtype
    assert found["x"].shape == tensor.shape
    assert torch.equal(found["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert meta == META


def test_it_reads_what_the_core_writes_in_its_order():
    tensors = {
        "b": torch.arange(12.0).view(3, 4).t(),
        "a": torch.tensor(1.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
    }
    packed = pack(tensors, META)
    ours, meta = view(packed)
    theirs, _ = loads(packed.tobytes())
    assert list(ours) == list(theirs)
    assert meta == META
    for name, tensor in tensors.items():
        assert ours[name].shape == tensor.shape
        assert torch.equal(ours[name], tensor)


def test_nothing_is_copied():
    packed = pack({"x": torch.arange(1000.0)}, None).copy()
    found, _ = view(packed)
    start = found["x"].data_ptr() - packed.ctypes.data
    assert 0 < start < len(packed)
    packed[start : start + 4] = np.frombuffer(np.float32(7).tobytes(), dtype=np.uint8)
    assert found["x"][0] == 7


def test_the_memory_outlives_its_owner():
    found, _ = view(pack({"x": torch.arange(100_000.0)}, None).copy())
    assert torch.equal(found["x"], torch.arange(100_000.0))


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:5], lambda b: b[:40], lambda b: b[:-8], lambda b: b[8:], lambda b: b[:0]]
)
def test_damaged_bytes_are_said(spoil):
    with pytest.raises(ValueError, match="these bytes are no whole safetensors"):
        view(spoil(pack({"x": torch.arange(100.0)}, {"a": 1})))
