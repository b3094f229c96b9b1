"""The transport between the local engine and its workers: frames over a socket, large ones in shared memory."""

from __future__ import annotations

import contextlib
import mmap
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore.base.errors import StorageError
from fedcore.base.files import OVERFLOW, OwnedFolder, lacks_room, remove_abandoned, storing
from fedcore.engines.buffers import Buffers, LentBuffers
from fedcore.engines.frames import LENGTHS, Parts, pack_frame, size_of, unpack_frame, unpack_whole

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folders in it are private
INLINE_BYTES = 1 << 18
"""Longer messages go through the spool, so that the sender need not wait until they are read."""
SPOOLED = "spooled"
BUFFERED = "buffered"
WORKER_SPEC = "worker-spec"
"""Name of what a worker is set up with, in the spool."""


class Spool:
    """The files in which processes exchange tensors: in shared memory and, without room there, in the temporary folder.

    :param path: the folder; a link in it, ``overflow``, leads to the one for what finds no room.
    """

    PREFIX = "fedcore-spool-"

    def __init__(self, path: Path) -> None:
        self.path, self._overflow = path, path / OVERFLOW

    @classmethod
    def make_folders(cls, needed: int) -> list[OwnedFolder]:
        """Make the spool's folder, and the one that it overflows to, if any, after deleting abandoned ones.

        It is in shared memory if that can be written and has room for ``needed`` bytes and as many again.

        :raises StorageError: the temporary folder cannot be written.
        """
        elsewhere = Path(tempfile.gettempdir())
        for place in (SHARED_MEMORY, elsewhere):
            remove_abandoned(place, cls.PREFIX)
        with storing(elsewhere):
            folders = [OwnedFolder(elsewhere, cls.PREFIX)]
        with contextlib.suppress(OSError):  # there is none, or it is read-only
            if shutil.disk_usage(SHARED_MEMORY).free > 2 * needed + (64 << 20):
                folders.insert(0, OwnedFolder(SHARED_MEMORY, cls.PREFIX))
                (folders[0].path / OVERFLOW).symlink_to(folders[1].path)
        return folders

    def put(self, name: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Write named tensors and a JSON value.

        :raises StorageError: there is no room.
        """
        self.put_frame(name, pack_frame(tensors, meta))

    def get(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Map what :meth:`put` wrote."""
        with self._file(name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return unpack_whole(memoryview(mapped))

    def put_frame(self, name: str, frame: Parts) -> None:
        """Write a packed frame, or nothing.

        :raises StorageError: there is no room.
        """
        try:
            _write(self._in(self.path, name), frame)
        except StorageError as error:
            if not lacks_room(error) or not self._overflow.exists():
                raise
            _write(self._in(self._overflow, name), frame)

    def delete(self, name: str) -> None:
        """Delete what :meth:`put` wrote; mapped tensors stay readable. Idempotent."""
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        path, other = self._in(self.path, name), self._in(self._overflow, name)
        return other if not path.exists() and other.exists() else path

    @staticmethod
    def _in(folder: Path, name: str) -> Path:
        return folder / f"{name}.frame"


def _write(path: Path, frame: Parts) -> None:
    with storing(path):
        file = path.open("xb")
        try:
            with file:
                file.writelines(frame)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


class Channel:
    """One end of a connection; a message is a kind, named tensors and a JSON value.

    :param buffers: given at the end that lends one with each of its messages, for the answer to it.
    """

    def __init__(self, connection: socket.socket, spool: Spool, buffers: Buffers | None = None) -> None:
        self.connection, self.spool = connection, spool
        self._buffers, self._lent_to_us = buffers, LentBuffers(spool.path)
        self._buffer: str | None = None  # lent for the next answer

    def send(self, kind: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Send one message; beyond INLINE_BYTES its frame goes through the buffer lent for it, or the spool."""
        if self._buffers is not None and self._buffer is None:  # one that was not answered into serves again
            self._buffer = self._buffers.lend()
        frame = pack_frame(tensors, [kind, meta, self._buffer])
        if size_of(frame) > INLINE_BYTES:
            where: list[Any] | None = None
            if self._buffers is None and self._buffer is not None:
                with contextlib.suppress(StorageError):  # where there is no room for a buffer the spool may have some
                    where = [BUFFERED, [self._buffer, self._lent_to_us.write(self._buffer, frame)], None]
            if where is None:
                name = uuid.uuid4().hex
                self.spool.put_frame(name, frame)
                where = [SPOOLED, name, None]
            frame = pack_frame({}, where)
        self.connection.sendall(b"".join(frame))

    def send_bytes(self, content: bytes) -> None:
        """Send bytes through the connection, whatever their number: in no file."""
        self.connection.sendall(LENGTHS.pack(len(content), 0) + content)

    def receive_bytes(self) -> bytes:
        """Wait for bytes of :meth:`send_bytes`.

        :raises EOFError: the other end is gone.
        """
        length, _ = LENGTHS.unpack(self._read(LENGTHS.size))
        return bytes(self._read(length))

    def close(self) -> None:
        """Close the connection; a buffer that a process did not write to before it ended can be lent again."""
        self._give_back()
        self.connection.close()

    def receive(self) -> tuple[str, dict[str, Tensor], Any]:
        """Wait for one message.

        :raises EOFError: the other end is gone.
        """
        try:
            text_length, data_length = LENGTHS.unpack(self._read(LENGTHS.size))
            tensors, (kind, meta, lent) = unpack_frame(bytes(self._read(text_length)), self._read_tensor(data_length))
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if kind == SPOOLED:
            name = meta
            tensors, (kind, meta, lent) = self.spool.get(name)
            self.spool.delete(name)
        if self._buffers is None:
            self._buffer = lent
        elif kind == BUFFERED:
            self._buffer = None
            tensors, (kind, meta, _) = unpack_whole(self._buffers.read(*meta))
        else:
            self._give_back()
        return kind, tensors, meta

    def _give_back(self) -> None:
        if self._buffers is not None and self._buffer is not None:
            self._buffers.give_back(self._buffer)
        self._buffer = None

    def _read(self, length: int) -> bytearray:
        content = bytearray(length)
        self._fill(memoryview(content))
        return content

    def _read_tensor(self, length: int) -> Tensor:
        content = torch.empty(length, dtype=torch.uint8)
        if length:
            self._fill(memoryview(content.numpy()))  # type: ignore[arg-type]
        return content

    def _fill(self, target: memoryview) -> None:
        while target:
            count = self.connection.recv_into(target)
            if not count:
                raise EOFError("the connection was closed")
            target = target[count:]


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return this process's end of a new connection, and the end to hand to a child."""
    return socket.socketpair()
