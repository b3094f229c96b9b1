"""Frames between the engine and its workers: over a socket, and in memory that both map."""

import errno
import os
import socket
import threading

import pytest
import torch

from fedcore.tools import StorageError
from fedcore_workers import transport
from fedcore_workers.transport import LENGTHS, ROOM, Channel, get_frame, put_frame

LARGE = 1 << 20

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


@pytest.fixture
def ends():
    pair = [Channel(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.connection.close()


def received(ends, tensors, value, **named):
    """Send a frame, however large, and return what arrives."""
    sender, receiver = ends
    sending = threading.Thread(target=sender.send, args=(tensors, value), kwargs=named)
    sending.start()
    try:
        return receiver.receive()
    finally:
        sending.join()


def by_socket(ends, tensors):
    return received(ends, tensors, {"id": "t"})[:2]


def by_memory(ends, tensors):
    return get_frame(put_frame(tensors, {"id": "t"}))


@pytest.mark.parametrize("filler", [1, LARGE])
@pytest.mark.parametrize("way", [by_socket, by_memory])
def test_tensors_of_every_kind_arrive_aligned_and_writable(ends, way, filler):
    sent = {**SENT, "filler": torch.arange(filler)}
    tensors, value = way(ends, sent)
    assert value == {"id": "t"}
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
        sender.send({"x": torch.full((5,), float(number))}, {"number": number})
    for number in range(3):
        tensors, value, descriptor = receiver.receive()
        assert (float(tensors["x"].sum()), value, descriptor) == (5.0 * number, {"number": number}, None)


@pytest.mark.parametrize("numbers", [10, ROOM.start // 4, ROOM.stop // 8, ROOM.stop // 4])
def test_answers_of_every_size_arrive_whole_and_are_the_receivers_own(ends, numbers):
    """Answers of middle size go through one room, which the next answer uses again."""
    asking, answering = ends
    kept = []
    for round_number in range(3):
        size = numbers + 1000 * (round_number == 1)  # a larger one needs another room
        asking.send({}, round_number)
        assert answering.receive()[1] == round_number
        tensors, value, lent = received((answering, asking), {"x": torch.full((size,), round_number)}, ["answer"])
        assert (value, lent) == (["answer"], None)
        kept.append(tensors["x"])
    read = [(len(own), own.unique().tolist()) for own in kept]
    assert read == [(numbers, [0]), (numbers + 1000, [1]), (numbers, [2])]


def test_a_room_is_not_written_before_the_other_end_has_read_it(ends):
    """Who sends twice without an answer in between sends the second frame through the socket."""
    one, other = ends
    other.send({}, "go")
    one.receive()
    sending = threading.Thread(target=lambda: [one.send({"x": torch.full((LARGE,), k)}, k) for k in range(3)])
    sending.start()
    arrived = [other.receive() for _ in range(3)]
    sending.join()
    assert [(value, tensors["x"].unique().tolist()) for tensors, value, _ in arrived] == [(k, [k]) for k in range(3)]


def rooms():
    """Return the rooms that this process has open, with their descriptors."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.islink(link) and "memfd:fedcore" in os.readlink(link)]


def test_a_room_is_freed_with_its_ends():
    before = rooms()
    one, other = (Channel(end) for end in socket.socketpair())
    other.send({}, "go")
    one.receive()
    received((one, other), {"x": torch.arange(LARGE)}, None)
    assert len(rooms()) > len(before)
    for end in (one, other):
        end.connection.close()
    del one, other, end
    assert rooms() == before


def test_a_room_for_an_end_that_is_gone_does_not_stay_open():
    before = rooms()
    one, other = (Channel(end) for end in socket.socketpair())
    other.send({}, "go")
    one.receive()
    other.connection.close()
    with pytest.raises(ConnectionError):
        one.send({"x": torch.arange(LARGE)}, None)
    one.connection.close()
    del one
    assert rooms() == before


def test_memory_is_lent_with_a_message_and_what_a_process_writes_stays_its_own(ends):
    memory = put_frame({"w": torch.ones(3)}, "payload")
    _, _, lent = received(ends, {}, None, descriptor=memory)
    assert lent != memory
    tensors, value = get_frame(lent)
    tensors["w"].zero_()
    again, _ = get_frame(memory)
    assert (value, again["w"].tolist()) == ("payload", [1, 1, 1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)


def test_without_room_nothing_stays_open(monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(transport, "_pieces", full)
    with pytest.raises(StorageError, match="make room"):
        put_frame({"x": torch.zeros(3)}, None)
    assert os.listdir("/proc/self/fd") == before


def test_memory_where_the_system_has_no_memory_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    tensors, value = get_frame(put_frame({"x": torch.arange(LARGE)}, 1))
    assert (value, torch.equal(tensors["x"], torch.arange(LARGE))) == (1, True)


@pytest.mark.parametrize("part", [b"", b"\0", b"\0" + LENGTHS.pack(64, 64) + bytes(100)])
def test_a_connection_that_ends_says_so(ends, part):
    sender, receiver = ends
    sender.connection.sendall(part)
    sender.connection.close()
    with pytest.raises(EOFError):
        receiver.receive()
