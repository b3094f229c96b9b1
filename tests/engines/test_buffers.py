"""Buffers that the engine lends its workers for large answers: kept, and never written while a tensor lies in one."""

import errno
import resource
from pathlib import Path

import pytest
import torch

from fedcore.base.errors import StorageError
from fedcore.engines.buffers import Buffers, LentBuffers
from fedcore.engines.channel import INLINE_BYTES, Channel, Spool, socket_pair
from fedcore.engines.frames import pack_frame, unpack_whole

LARGE = torch.arange(INLINE_BYTES)


@pytest.fixture
def buffers(tmp_path):
    return Buffers(tmp_path)


@pytest.fixture
def first(buffers):
    """The name of the buffer that is lent next, unless it is still lent."""
    name = buffers.lend()
    buffers.give_back(name)
    return name


@pytest.fixture
def ends(tmp_path, buffers):
    ours, theirs = socket_pair()
    pair = Channel(ours, Spool(tmp_path), buffers), Channel(theirs, Spool(tmp_path))
    yield pair
    for end in pair:
        end.close()


def answered(ends, tensors):
    """Send a task, answer it, and return the tensors that arrive."""
    engine, worker = ends
    engine.send("task", {}, None)
    worker.receive()
    worker.send("result", tensors, {"id": 1})
    kind, arrived, meta = engine.receive()
    assert (kind, meta) == ("result", {"id": 1})
    return arrived


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_buffer_serves_all_answers_that_are_dropped(ends, tmp_path):
    for number in range(4):
        arrived = answered(ends, {"x": LARGE + number})
        assert torch.equal(arrived["x"], LARGE + number)
        arrived["x"].zero_()  # hooks may write to an update
        del arrived
    assert len(files(tmp_path)) == 1


def test_an_answer_that_is_kept_is_not_written_over(ends, tmp_path):
    kept = [answered(ends, {"x": LARGE + number, "y": torch.ones(3)})["x"] for number in range(3)]
    assert all(torch.equal(tensor, LARGE + number) for number, tensor in enumerate(kept))
    assert len(files(tmp_path)) == 3
    part = kept.pop()[5:7]  # a view keeps the whole
    kept.clear()
    for number in range(5):
        answered(ends, {"x": LARGE - number})
    assert part.tolist() == [7, 8]
    assert len(files(tmp_path)) == 3


def test_small_answers_leave_their_buffer_to_the_next(ends, tmp_path, buffers, first):
    for _ in range(3):
        assert answered(ends, {"x": torch.ones(3)})["x"].tolist() == [1, 1, 1]
    assert files(tmp_path) == []
    assert buffers.lend() == first


def test_a_worker_that_is_gone_leaves_its_buffer_to_others(ends, buffers, first):
    engine, worker = ends
    engine.send("task", {}, None)
    worker.receive()
    assert buffers.lend() != first
    engine.send("stop", {}, None)
    engine.close()
    assert buffers.lend() == first


def test_a_large_answer_without_tensors(ends):
    engine, worker = ends
    engine.send("task", {}, None)
    worker.receive()
    worker.send("result", {}, "a" * INLINE_BYTES)
    assert engine.receive() == ("result", {}, "a" * INLINE_BYTES)


def test_workers_of_different_sizes_share_a_buffer(buffers, tmp_path):
    """Whoever has mapped a file relies on its length: it grows and never shrinks."""
    one, other = LentBuffers(tmp_path), LentBuffers(tmp_path)
    for writer, count in ((one, 9000), (other, 10), (one, 8000), (other, 20000), (one, 19000), (other, 5)):
        name = buffers.lend()
        sent = torch.randn(count)
        tensors, value = unpack_whole(buffers.read(name, writer.write(name, pack_frame({"x": sent}, count))))
        assert value == count
        assert torch.equal(tensors["x"], sent)
        del tensors
    assert len(files(tmp_path)) == 1


def test_a_full_spool_is_a_storage_error_and_kills_no_process(buffers, tmp_path, monkeypatch):
    """A first write to mapped memory without room would: pages are allocated by writes to the file."""
    frame = pack_frame({"x": torch.zeros(1000)}, None)
    writer, name = LentBuffers(tmp_path), buffers.lend()
    writer.write(name, frame)
    buffers.read(name, 64)

    def full(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    assert buffers.lend() == name
    writer.write(name, frame)  # its pages are there
    with pytest.raises(StorageError, match="make room"):
        writer.write(name, pack_frame({"x": torch.zeros(2000)}, None))


def test_an_answer_without_room_in_its_buffer_goes_through_the_spool(ends, buffers, first, tmp_path, monkeypatch):
    def full(writer, name, frame):
        raise StorageError("no room")

    monkeypatch.setattr(LentBuffers, "write", full)
    assert torch.equal(answered(ends, {"x": LARGE})["x"], LARGE)
    assert files(tmp_path) == []
    assert buffers.lend() == first


@pytest.mark.parametrize("had", [0, 1000])
def test_what_finds_no_room_takes_none(tmp_path, had):
    writer = LentBuffers(tmp_path)
    if had:
        writer.write("buffer", pack_frame({"x": torch.zeros(had)}, None))
    before = (tmp_path / "buffer").stat().st_size if had else 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="make room"):
            writer.write("buffer", pack_frame({"x": torch.zeros(100_000)}, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "buffer").stat().st_size == before
