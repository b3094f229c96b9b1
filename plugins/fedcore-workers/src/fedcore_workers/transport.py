"""The transport between the local engine and its workers: frames over a socket, and frames in shared memory.

A frame holds named tensors and a JSON value as bytes: two lengths, a JSON text and the tensors' bytes. Each tensor
starts at a multiple of 64, as torch aligns tensors. Both ends run the same version, and a frame outlives neither of
them. It therefore needs no checksum and no common format. A small frame takes tenths of a millisecond less than
safetensors.

The tensors of a frame of middle size go through memory that both ends map, the sender's room. A socket holds some 200
KiB: the ends would wake each other for each part, which takes longer than a client of one step.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore import Tensors
from fedcore.tools import files

ALIGNMENT = 64
LENGTHS = struct.Struct("<QQ")
"""Two numbers of bytes: of the JSON text with its padding, and of the tensors."""
IN_LINE, IN_ROOM = b"\0", b"\1"
"""A message's first byte: whether the tensors' bytes follow in the socket, or are in the sender's room."""
ROOM = range(1 << 16, 1 << 24)
"""The numbers of the tensors' bytes that go through a room. More would double the memory of a large model's updates."""


def _pieces(tensors: Mapping[str, Tensor], value: Any) -> list[bytes | memoryview]:
    """Return the frame of named tensors and a JSON value in pieces.

    The pieces of contiguous tensors on the CPU share the tensors' memory.
    """
    described, data, position = [], list[bytes | memoryview](), 0
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        described.append((name, str(plain.dtype).removeprefix("torch."), plain.shape, position))
        if plain.numel():
            content = memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            data += (content, _padding(len(content)))
            position += len(content) + len(data[-1])
    text = json.dumps([value, described]).encode()
    text += _padding(LENGTHS.size + len(text))
    return [LENGTHS.pack(len(text), position), text, *data]


def unpack_frame(frame: Tensor) -> tuple[Tensors, Any]:
    """Return the tensors and the value of a frame, (n,) uint8. The tensors are views of the frame."""
    content = memoryview(frame.numpy())  # type: ignore[arg-type]
    begin = LENGTHS.size + LENGTHS.unpack_from(content)[0]
    value, described = files.parse_json(bytes(content[LENGTHS.size : begin]).rstrip(b"\0"))
    tensors = {}
    for name, dtype_name, shape, position in described:
        dtype = getattr(torch, dtype_name)
        data = frame.narrow(0, begin + position, math.prod(shape) * dtype.itemsize)
        tensors[name] = data.view(dtype).view(shape)
    return tensors, value


def _padding(length: int) -> bytes:
    return bytes(-length % ALIGNMENT)


def put_frame(tensors: Mapping[str, Tensor], value: Any) -> int:
    """Put a frame into memory that other processes can map, and return its descriptor.

    :raises StorageError: there is no room.
    """
    with _nameless() as number, open(number, "wb", closefd=False) as file:
        file.writelines(_pieces(tensors, value))
    return number


@contextlib.contextmanager
def _nameless() -> Iterator[int]:
    """Give memory that other processes can map, by its descriptor. If the block raises, the descriptor is closed.

    The memory has no name. The kernel frees it when the last process with the descriptor has ended, even by a kill.

    :raises StorageError: there is no room.
    """
    with files.storing(Path(tempfile.gettempdir())):
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("fedcore")
        else:
            with tempfile.TemporaryFile() as file:
                number = os.dup(file.fileno())
        try:
            yield number
        except BaseException:
            os.close(number)
            raise


def get_frame(number: int) -> tuple[Tensors, Any]:
    """Map a frame of :func:`put_frame`, and close the descriptor. Writes to the tensors stay in this process."""
    mapped = mmap.mmap(number, 0, access=mmap.ACCESS_COPY)
    os.close(number)
    return unpack_frame(torch.frombuffer(mapped, dtype=torch.uint8))


class Channel:
    """One end of a connection that carries frames, and descriptors of frames in memory.

    An end that sends answers what it received, and the other end sends again only when it has the answer. Only such an
    answer goes through the room, which is thus free for the next one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._owes_answer = False
        self._room, self._theirs = mmap.mmap(-1, 1), mmap.mmap(-1, 1)  # no frame fits: the first one makes another

    def send(self, tensors: Mapping[str, Tensor], value: Any, *, descriptor: int | None = None) -> None:
        """Send a frame, and a descriptor with it if one is given. The descriptor stays open here."""
        lengths, text, *data = _pieces(tensors, value)
        size = LENGTHS.unpack(lengths)[1]
        if self._owes_answer and size in ROOM and descriptor is None:
            self._owes_answer = False
            descriptors = self._make_room(size)
            for piece in data:
                self._room.write(piece)
            try:
                self._send([IN_ROOM, lengths, text], descriptors)
            finally:
                for number in descriptors:
                    os.close(number)
            return
        at_once = data if size < ROOM.start else []
        self._send([IN_LINE, lengths, text, *at_once], [] if descriptor is None else [descriptor])
        for piece in data if not at_once else []:
            self.connection.sendall(piece)

    def _make_room(self, size: int) -> list[int]:
        """Go to the begin of the room. If it is too small, make another one, and return its descriptor in a list."""
        self._room.seek(0)
        if len(self._room) >= size:
            return []
        with _nameless() as number:
            os.truncate(number, size)
            self._room = mmap.mmap(number, size)
        return [number]

    def _send(self, pieces: Sequence[bytes | memoryview], descriptors: Sequence[int]) -> None:
        """Send small pieces at once: the other end wakes for the first byte, and would wait for the next one."""
        message = b"".join(pieces)
        self.connection.sendall(message[socket.send_fds(self.connection, [message], descriptors) :])

    def receive(self) -> tuple[Tensors, Any, int | None]:
        """Wait for a frame. Return its tensors, its value, and the descriptor that came with it, or None.

        :raises EOFError: the other end is gone.
        :raises TimeoutError: the connection has a time limit, and the frame did not arrive within it.
        """
        try:
            head, descriptors, _, _ = socket.recv_fds(self.connection, 1 + LENGTHS.size, 1)
            if not head:
                raise EOFError("the connection was closed")
            lengths = bytearray(head[1:].ljust(LENGTHS.size))
            self._fill(memoryview(lengths)[len(head) - 1 :])
            text_size, data_size = LENGTHS.unpack(lengths)
            frame = torch.empty(LENGTHS.size + text_size + data_size, dtype=torch.uint8)
            content = memoryview(frame.numpy())  # type: ignore[arg-type]
            content[: LENGTHS.size] = lengths
            if head[:1] == IN_ROOM:
                if descriptors:
                    self._theirs = mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ)
                    os.close(descriptors.pop())
                self._fill(content[LENGTHS.size : -data_size])
                content[-data_size:] = memoryview(self._theirs)[:data_size]
            else:
                self._fill(content[LENGTHS.size :])
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        self._owes_answer = True
        return *unpack_frame(frame), next(iter(descriptors), None)

    def _fill(self, target: memoryview) -> None:
        while target:
            count = self.connection.recv_into(target)
            if not count:
                raise EOFError("the connection was closed")
            target = target[count:]
