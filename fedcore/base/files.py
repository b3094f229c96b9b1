"""Files that are whole or absent, JSON, lines of records, and temporary folders. Imports no torch.

A file is written next to its target and then renamed. If the process is killed or the disk is full, the old file or the
new file remains, never a part of one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcore.base.errors import RunDirectoryError, StorageError

TEMPORARY = ".tmp"
"""Suffix of a file that is being written."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an OSError at writing ``path`` into a StorageError that names it.

    :raises StorageError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        remedy = "; make room there" if error.errno in _NO_ROOM else ""
        raise StorageError(f"cannot write {path}: {error.strerror or error}{remedy}") from error


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool) -> Iterator[Path]:
    """Yield a temporary path. The file that the block writes there replaces ``path`` if the block does not raise.

    :param sync: wait until the disk has the file and its name. Files that must survive a power failure need this.
    :raises StorageError: instead of an OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with storing(path):
        try:
            yield temporary
            if sync:
                sync_path(temporary)
            os.replace(temporary, path)
            if sync:
                sync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file atomically. Parameters and errors are as for :func:`replacing`."""
    with replacing(path, sync=sync) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a text file atomically. Parameters and errors are as for :func:`replacing`."""
    write_bytes(path, text.encode(), sync=sync)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. Errors are as for :func:`replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync_path(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder.

    :raises OSError: the operating system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folders: Iterable[Path]) -> None:
    """Wait until the disk has the names of these folders. A parent that may not be read is skipped."""
    for folder in folders:
        with contextlib.suppress(PermissionError):
            sync_path(folder.parent)


def make_folders(path: Path) -> list[Path]:
    """Make a folder and its parents, and wait until the disk has their names. Return the new ones, innermost first.

    :raises OSError: a folder cannot be made.
    """
    path = path.absolute()
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    sync_names(missing)
    return missing


def delete_others(folder: Path, keep: Callable[[str], bool]) -> None:
    """Delete the files of rounds in a folder, except for the names to keep. A missing folder counts as empty.

    The name of such a file begins with six digits, behind a dot while it is being written. Others are not fedcore's.

    :raises StorageError: a file cannot be deleted.
    """
    with storing(folder), contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.lstrip(".")[:6].isdecimal() and not keep(name):
                os.unlink(folder / name)


def refuse_links(directory: Path, *, deep: bool = True) -> None:
    """Refuse a directory that holds a link, or an entry that is neither a file nor a folder.

    This prevents two accidents with a run directory from somebody else. A link could lead to files that fedcore would
    overwrite or delete. A pipe would let its reader wait forever. W&B's own folder is skipped: W&B makes links to its
    logs there, and fedcore writes nothing there.

    :param deep: also walk through the folders in the directory.
    :raises RunDirectoryError: names the entry.
    :raises StorageError: a folder cannot be read.
    """
    root = directory.resolve()
    waiting: list[Path | str] = [root]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as listing:
                entries = list(listing)
        except OSError as error:
            raise StorageError(f"cannot read the folder {folder}: {error.strerror or error}") from error
        for entry in entries:
            if entry.is_symlink():
                raise RunDirectoryError(
                    f"{entry.path} is a link, to {os.readlink(entry.path)}. Put the file or folder itself "
                    "there; what is read and written has to be inside"
                )
            if entry.is_dir():
                if deep and not (folder == root and entry.name == "wandb"):
                    waiting.append(entry.path)
            elif not entry.is_file():
                raise RunDirectoryError(f"{entry.path} is neither a file nor a folder; delete it")


def parse_json(text: str | bytes) -> Any:
    """Return a JSON text's value.

    :raises ValueError: the text is invalid or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(value: Any) -> Any:
    """Return a JSON value with None instead of nan and inf, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_record(text: str | bytes) -> dict[str, Any]:
    """Return a JSON mapping.

    :raises ValueError: the text is not a JSON mapping.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is not a record")
    return value


class RecordFile:
    """A file with one JSON record per line. One process appends to it. A line that a kill tore apart is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
        """The length of the file in bytes, as this process left it."""

    def append(self, record: Mapping[str, Any]) -> int:
        """Append a line and return the file's new length in bytes.

        :raises StorageError: the line cannot be written. A part of it may be in the file; :meth:`restore` cuts it off.
            Also raised if the file is not as this process left it: its directory was moved, deleted or replaced, or
            another process writes to it.
        """
        line = (json.dumps(finite(record)) + "\n").encode()
        with storing(self.path), self.path.open("r+b" if self.length else "ab") as file:
            length = file.seek(0, os.SEEK_END)
            if length != self.length:
                raise OSError(f"another process writes to it: it has {length} bytes, and this one wrote {self.length}")
            file.write(line)
        self.length += len(line)
        return self.length

    def restore(self, length: int | None = None) -> None:
        """Continue after the first ``length`` bytes, by default after the last whole line. The rest is cut off.

        :raises StorageError: the file cannot be read or written.
        """
        content = self.content()[:length]
        content = content[: content.rfind(b"\n") + 1]
        if self.path.exists():
            with storing(self.path):
                os.truncate(self.path, len(content))
        self.length = len(content)

    def check(self, length: int) -> None:
        """Refuse a file without ``length`` bytes of whole lines. :meth:`restore` would lose a line that was counted.

        This finds a file that was cut, or edited to another length.

        :raises RunDirectoryError: names the length.
        """
        counted = self.content()[:length]
        if len(counted) < length or counted[-1:] not in (b"", b"\n"):
            raise RunDirectoryError(
                f"{self.path.name} was changed: no line of it ends after {length} bytes, as this checkpoint counts them"
            )

    def content(self) -> bytes:
        """Return the file's bytes; empty if there is no file.

        :raises StorageError: the file cannot be read.
        """
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror or error}") from error

    def read(self, note: Callable[[str], None] = lambda message: None) -> list[dict[str, Any]]:
        """Return the records of the whole lines. A last line without its end is left out: it is being written.

        :param note: called with a message about lines that hold no record. These lines are left out.
        """
        records, damaged = [], []
        for number, line in enumerate(self.content().split(b"\n")[:-1], start=1):
            try:
                records.append(parse_record(line))
            except ValueError:
                damaged.append(str(number))
        if damaged:
            note(f"{self.path}: damaged in line {', '.join(damaged)}, which is left out")
        return records
