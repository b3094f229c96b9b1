"""Buffers in shared memory that the local engine lends its workers for large answers.

A file that is made, mapped and deleted for every answer costs more than the copy itself: the kernel finds, clears and
frees each page. A buffer keeps its pages. The engine lends one with each task, and a worker copies its answer into it.
It is free again when no tensor of the answer is left.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
import weakref
from pathlib import Path

from fedcore.base.errors import StorageError
from fedcore.base.files import storing
from fedcore.engines.frames import Parts, size_of


class Buffers:
    """The buffers of an engine: lent, read, and lent again.

    :param folder: the spool's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: list[str] = []
        self._mapped: dict[str, mmap.mmap] = {}

    def lend(self) -> str:
        """Return the name of a buffer that no tensor lies in; its file may not be there yet."""
        return self._free.pop() if self._free else f"buffer-{uuid.uuid4().hex}"

    def give_back(self, name: str) -> None:
        """Take a buffer back in which nothing was written."""
        self._free.append(name)

    def read(self, name: str, length: int) -> memoryview:
        """Return what a worker wrote; when the view and all tensors in it are gone, the buffer is free again."""
        if name not in self._mapped or len(self._mapped[name]) < length:
            self._mapped[name] = _map(self._folder / name)
        content = memoryview(self._mapped[name])[:length]
        weakref.finalize(content, self._free.append, name)
        return content


class LentBuffers:
    """A worker's side: the buffers that it has written to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[str, mmap.mmap] = {}

    def write(self, name: str, frame: Parts) -> int:
        """Write a frame into a buffer; returns its length.

        :raises StorageError: there is no room. Pages are allocated by writes to the file, which say so; a write to
            mapped memory without room would kill the process.
        """
        length = size_of(frame)
        if name not in self._mapped or len(self._mapped[name]) < length:
            path = self._folder / name
            had = path.stat().st_size if path.exists() else None
            try:
                with storing(path), path.open("xb" if had is None else "r+b") as file:
                    file.writelines(frame)  # others map what is there: it never gets shorter than that
            except StorageError:
                with contextlib.suppress(OSError):
                    os.truncate(path, had or 0)  # what found no room takes none
                raise
            self._mapped[name] = _map(path)
            return length
        target, begin = memoryview(self._mapped[name]), 0
        for part in frame:
            target[begin : begin + len(part)] = part
            begin += len(part)
        return length


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
