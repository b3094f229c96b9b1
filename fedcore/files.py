"""Files written beside their target and renamed: a reader sees the old one or the new one, never a part. No torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedcore.errors import StorageError

TEMPORARY = ".tmp"
"""How the name of a file ends that is being written."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parse_json(text: str | bytes) -> Any:
    """Return a JSON text's value.

    :raises ValueError: it is none, nested too deeply, or holds half a character (``"\\ud800"``).
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()  # json would let halves of characters pass
        value = json.loads(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start]!r}, half a character") from None
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    :raises StorageError: there is no room, or no permission.
    """
    with replacing(path, sync=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; raises as :func:`write_text`."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool) -> Iterator[Path]:
    """Give a file to write, which takes the place of ``path`` when the block ends well.

    :param sync: wait until the disk has it, and its name, for what must survive a power failure.
    :raises StorageError: in place of an OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with storing(path):
        try:
            yield temporary
            if sync:
                sync_file(temporary)
            temporary.replace(path)
            if sync:
                sync_file(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn what the system says against writing ``path`` into an error for people.

    :raises StorageError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        remedy = "; make room there" if error.errno in _NO_ROOM else ""
        raise StorageError(f"cannot write {path}: {error.strerror or error}{remedy}") from error


def sync_file(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
