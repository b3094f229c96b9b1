"""Files with one JSON record per line: ``metrics.jsonl`` and ``sessions.jsonl``.

Each line carries a checksum into which the run's own configuration goes, so that a line of another run does not fit. A
checkpoint counts the bytes that were written before it and carries their SHA-256. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcore.base.errors import RunDirectoryError, StorageError
from fedcore.storage.files import open_inside, read_bytes, replacing, storing, sync_inside
from fedcore.storage.json_values import finite, parse_json, sealed, unsealed


class RecordFile:
    """A file of records in a run directory.

    :param mark: returns what the lines' checksums start from, see :attr:`fedcore.runs.saved.Binding.mark`.
    """

    def __init__(self, path: Path, mark: Callable[[], str]) -> None:
        self.path, self._mark = path, mark
        self._written = hashlib.sha256()  # of the content, as far as this process knows it
        self._digests: dict[int, str] = {0: self._written.hexdigest()}  # length -> SHA-256 of so much, the last few

    @property
    def length(self) -> int:
        """The bytes that were written, as far as this process knows them."""
        return max(self._digests)

    def digest(self, length: int) -> str | None:
        """Return the SHA-256, in hex, of the first bytes; None where this process did not see them end there."""
        return self._digests.get(length)

    def append(self, record: Mapping[str, Any]) -> int:
        """Append a line and return the file's new length in bytes.

        :raises StorageError: it cannot be written; a part of it may be, which :meth:`restore` drops. Or it is not as
            this process left it: the directory was moved or deleted, or another process writes to it.
        """
        line = (json.dumps(sealed(finite(record), self._mark())) + "\n").encode()
        flags = os.O_WRONLY | os.O_APPEND | (0 if self.length else os.O_CREAT)
        with storing(self.path), self._open(flags) as file:
            found = os.fstat(file).st_size
            if found != self.length:
                raise OSError(f"another process writes to it: it has {found} bytes, and this one wrote {self.length}")
            left = line
            while left:
                left = left[os.write(file, left) :]
            length = os.fstat(file).st_size
        self._written.update(line)
        self._digests = {**dict([*self._digests.items()][-2:]), length: self._written.hexdigest()}
        return length

    def restore(self, length: int | None = None) -> None:
        """Go on after the first ``length`` bytes and drop the rest; None keeps all and ends the last line.

        :raises StorageError: it cannot be written.
        """
        content = self.content()[:length]
        if self.path.exists():
            end = b"\n" if content and not content.endswith(b"\n") else b""
            with storing(self.path), self._open(os.O_WRONLY) as file:
                shared = os.fstat(file).st_nlink > 1
                if not shared:
                    os.ftruncate(file, len(content))
                    os.pwrite(file, end, len(content))
            content += end
            if shared:  # the directory is a copy made of hard links; the other one stays as it is
                with replacing(self.path, sync=False, inside=self.path.parent) as temporary:
                    temporary.write_bytes(content)
        self._written = hashlib.sha256(content)
        self._digests = {len(content): self._written.hexdigest()}

    def sync(self) -> None:
        """Wait until the disk has what was written, and the file's name.

        :raises StorageError: it cannot be done; the file is gone, for example.
        """
        if self.length:
            with storing(self.path):
                sync_inside(self.path, inside=self.path.parent)

    def content(self) -> bytes:
        """Return the file's bytes; none where there is no file.

        :raises StorageError: it cannot be read.
        """
        try:
            return read_bytes(self.path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror or error}") from error

    def read(self) -> list[dict[str, Any]]:
        """Return the records of the lines that are whole, without one that is being written."""
        whole, _, _ = self.content().rpartition(b"\n")
        return [record for line in whole.splitlines() if (record := self._record(line)) is not None]

    def damaged(self) -> list[int]:
        """Return the numbers of the lines, from 1, that are not as they were written."""
        lines = self.content().split(b"\n")[:-1]
        return [number for number, line in enumerate(lines, start=1) if self._record(line) is None]

    def damage(self) -> str:
        """Return which lines are damaged, in words; empty where none is."""
        numbers = ", ".join(map(str, self.damaged()))
        return f"damaged in line {numbers}" if numbers else ""

    def check(self, length: int, digest: str) -> None:
        """Refuse a file whose first bytes are not those that a checkpoint counts.

        :param digest: their SHA-256, in hex.
        :raises RunDirectoryError: what differs.
        """
        counted = self.check_length(length)
        if digest == hashlib.sha256(counted).hexdigest():
            return
        what = self.damage() or "not this run's, or lacks lines"
        raise RunDirectoryError(f"{self.path.name} is {what}")

    def check_length(self, length: int) -> bytes:
        """Return the first ``length`` bytes.

        :raises RunDirectoryError: they are not there in whole lines.
        """
        content = self.content()
        counted = content[:length]
        if len(counted) < length or (counted and not counted.endswith(b"\n")):
            raise RunDirectoryError(
                f"{self.path.name} is damaged: it has {len(content)} bytes, and {length} bytes of whole lines belong "
                "to this checkpoint"
            )
        return counted

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """Return a line's record, None where it is damaged."""
        try:
            return unsealed(parse_json(line), self._mark())
        except ValueError:
            return None

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        descriptor = open_inside(self.path, flags, inside=self.path.parent)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
