"""Frames between the local engine and its workers, small ones over the socket and large ones through the spool."""

from multiprocessing.connection import Connection

import pytest
import torch

from fedcore.engines.channel import INLINE_BYTES, Channel, Spool, socket_pair


@pytest.fixture
def ends(tmp_path):
    ours, theirs = socket_pair()
    spool = Spool(tmp_path)
    pair = Channel(ours, spool), Channel(Connection(theirs.detach()), spool)
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
