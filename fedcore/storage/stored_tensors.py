"""Tensors that stay in a file of :func:`fedcore.storage.serial.write_tensors`: pieces of them are read when needed."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.storage.json_values import parse_json


class StoredTensor:
    """A one-dimensional tensor of whole numbers in a file.

    :param file: the file, which stays open.
    :param start: its first byte there.
    :param mapped: the whole of it, (n,). What is read of it counts as memory of this process, in pages of up to 2 MiB.
    """

    def __init__(self, file: OpenFile, start: int, mapped: Tensor) -> None:
        self._file, self._start, self.mapped = file, start, mapped

    def read(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the numbers from ``begin`` to before ``end``, without mapping them.

        :raises DataError: the file was cut off meanwhile.
        """
        size, count = self.mapped.element_size(), end - begin
        found = self._file.read(self._start + size * begin, size * count)
        if len(found) != size * count:
            raise DataError(f"{self._file.path} was cut off while it was in use")
        return np.frombuffer(found, f"<i{size}").astype(np.int64)


class OpenFile:
    """A file that is open for reading as long as this object lives, even if it is deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)

    def read(self, start: int, count: int) -> bytes:
        """Return so many bytes from a place on, fewer at the file's end."""
        return os.pread(self._file.fileno(), count, start)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file that is known to be whole: nothing of them is read yet.

    :raises OSError: there is no such file.
    """
    file = OpenFile(path)
    length = int.from_bytes(file.read(0, 8), "little")
    header: dict[str, Any] = parse_json(file.read(8, length))
    tensors = safetensors.torch.load_file(path)
    return {name: StoredTensor(file, 8 + length + header[name]["data_offsets"][0], tensors[name]) for name in tensors}
