"""Frames between the local engine and its workers, small ones over the socket and large ones through the spool."""

import errno
import resource
from pathlib import Path

import pytest
import torch

from fedcore.base.errors import StorageError
from fedcore.base.files import OVERFLOW, delete
from fedcore.engines.channel import INLINE_BYTES, Channel, Spool, socket_pair
from fedcore.engines.frames import LENGTHS


@pytest.fixture
def ends(tmp_path):
    ours, theirs = socket_pair()
    spool = Spool(tmp_path)
    pair = Channel(ours, spool), Channel(theirs, spool)
    yield pair
    for end in pair:
        end.connection.close()


@pytest.mark.parametrize("numbers", [3, INLINE_BYTES])
def test_a_frame_arrives_and_leaves_nothing_in_the_spool(ends, tmp_path, numbers):
    sender, receiver = ends
    sender.send("task", {"a/b": torch.arange(numbers)}, {"id": "t"})
    assert len(list(tmp_path.iterdir())) == (numbers == INLINE_BYTES)
    kind, tensors, meta = receiver.receive()
    assert (kind, meta) == ("task", {"id": "t"})
    assert torch.equal(tensors["a/b"], torch.arange(numbers))
    assert not list(tmp_path.iterdir())


SENT = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "images": torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16),
    "whole": torch.tensor([[1, 2**40]]),
    "constant": torch.nn.Parameter(torch.ones(2, 3)),
}


@pytest.mark.parametrize("filler", [1, INLINE_BYTES])
def test_tensors_of_every_kind_arrive_aligned_and_writable(ends, filler):
    sender, receiver = ends
    sent = {**SENT, "filler": torch.zeros(filler)}
    sender.send("result", sent, None)
    _, tensors, _ = receiver.receive()
    assert list(tensors) == list(sent)
    for name, tensor in sent.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].is_contiguous(), name
        assert tensor.numel() == 0 or tensors[name].data_ptr() % 64 == 0, name
    tensors["transposed"].zero_()
    assert torch.equal(tensors["constant"], torch.ones(2, 3))


def test_messages_arrive_one_by_one_in_order(ends):
    sender, receiver = ends
    for number in range(3):
        sender.send("task", {"x": torch.full((5,), float(number))}, {"number": number})
    for number in range(3):
        _, tensors, meta = receiver.receive()
        assert (float(tensors["x"].sum()), meta) == (5.0 * number, {"number": number})


def test_a_full_spool_is_a_storage_error(ends, monkeypatch):
    def full(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StorageError, match="make room"):
        ends[0].send("result", {"x": torch.zeros(INLINE_BYTES)}, None)


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_frame_for_which_there_is_no_room_leaves_nothing(tmp_path, size):
    """A short one is written when the file is closed."""
    spool = Spool(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(StorageError, match="make room"):
            spool.put("payload", {"x": torch.zeros(size)}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())
    spool.put("payload", {"x": torch.ones(size)}, None)
    with pytest.raises(StorageError, match="exists"):
        spool.put("payload", {"x": torch.zeros(size)}, None)
    assert float(spool.get("payload")[0]["x"].sum()) == size


def full_at(folder, monkeypatch):
    """Let nothing be written in a folder for want of room."""
    real = Path.open

    def refuse(path, mode="r"):
        if path.parent == folder and mode != "rb":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode)

    monkeypatch.setattr(Path, "open", refuse)


def test_what_finds_no_room_overflows_and_is_deleted_with_the_spool(ends, tmp_path, monkeypatch):
    sender, receiver = ends
    other = tmp_path.with_name("other")
    other.mkdir()
    (tmp_path / OVERFLOW).symlink_to(other)
    full_at(tmp_path, monkeypatch)
    sender.send("result", {"x": torch.arange(INLINE_BYTES)}, None)
    assert len(list(other.iterdir())) == 1
    assert torch.equal(receiver.receive()[1]["x"], torch.arange(INLINE_BYTES))
    assert not any(other.iterdir())
    sender.spool.put("payload", {"w": torch.ones(2)}, None)
    with pytest.raises(StorageError, match="exists"):
        sender.spool.put("payload", {"w": torch.ones(2)}, None)
    assert receiver.spool.get("payload")[0]["w"].tolist() == [1, 1]
    delete(tmp_path)
    assert not tmp_path.exists()
    assert not other.exists()


def test_an_end_that_closes_within_a_message_is_the_end_of_file(ends):
    sender, receiver = ends
    sender.connection.sendall(LENGTHS.pack(48, 64) + b"[")
    sender.connection.close()
    with pytest.raises(EOFError):
        receiver.receive()


def test_a_closed_connection_is_the_end_of_file(ends):
    sender, receiver = ends
    sender.connection.close()
    with pytest.raises(EOFError):
        receiver.receive()


def test_the_spool_gives_back_what_was_put_and_deletes_twice(tmp_path):
    spool = Spool(tmp_path)
    spool.put("payload", {"w": torch.ones(2)}, {"lr": 0.1})
    tensors, meta = spool.get("payload")
    assert torch.equal(tensors["w"], torch.ones(2))
    assert meta == {"lr": 0.1}
    spool.delete("payload")
    spool.delete("payload")
    with pytest.raises(OSError, match="payload"):
        spool.get("payload")
