"""Tensors that stay in a file: pieces of them are read, also once the file has lost its name."""

from __future__ import annotations

import os

import pytest
import torch

from fedcore.base.errors import DataError
from fedcore.storage.serial import write_tensors
from fedcore.storage.stored_tensors import stored_tensors


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pieces(tmp_path, dtype):
    tensors = {"a": torch.arange(1000, dtype=dtype) - 7, "b": torch.arange(5), "none": torch.empty(0, dtype=dtype)}
    write_tensors(tmp_path / "file", tensors, {"any": "value"})
    stored = stored_tensors(tmp_path / "file")
    os.unlink(tmp_path / "file")
    for name, tensor in tensors.items():
        assert torch.equal(stored[name].mapped, tensor)
        for begin, end in ((0, len(tensor)), (len(tensor) // 3, len(tensor) // 2), (2, 2)):
            piece = torch.from_numpy(stored[name].read(begin, end))
            assert piece.dtype == torch.int64
            assert torch.equal(piece, tensor[begin:end].long())


def test_a_file_that_is_cut_off(tmp_path):
    write_tensors(tmp_path / "file", {"a": torch.arange(1000)})
    stored = stored_tensors(tmp_path / "file")["a"]
    os.truncate(tmp_path / "file", 4096)
    with pytest.raises(DataError, match="file was cut off while it was in use"):
        stored.read(990, 1000)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        stored_tensors(tmp_path / "file")


def test_the_file_is_closed_with_the_last_tensor(tmp_path):
    write_tensors(tmp_path / "file", {"a": torch.arange(10)})
    stored = stored_tensors(tmp_path / "file")

    def opened():
        links = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path))
        return str(tmp_path / "file") in links

    assert opened()
    del stored
    assert not opened()
