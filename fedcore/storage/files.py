"""Atomic files: complete or absent, never a pipe, never written through a link. Imports no torch.

A file is written beside its target and renamed: a reader sees the old one or the new one, never a part. A run
directory from someone else may contain links. Files in it are therefore opened folder by folder, each relative to the
one before and none through a link, starting at the directory that the user named.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fedcore.base.errors import StorageError

TEMPORARY = ".tmp"
"""Suffix of a file that is being written."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_bytes(path: Path) -> bytes:
    """Return a file's content; a pipe is refused without waiting for it.

    :raises OSError: there is none, or something that is no file.
    """
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read; raises as :func:`read_bytes`."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        _require_file(os.fstat(file.fileno()).st_mode, path)
        yield file


def read_text(path: Path) -> str:
    """Return a text file's content, UTF-8; raises as :func:`read_bytes`, and ValueError for other bytes."""
    return read_bytes(path).decode()


def require_file(path: Path) -> None:
    """Refuse a path that is not a regular file, before a library opens it and waits at a pipe.

    :raises OSError: there is none, or something that is no file.
    """
    _require_file(path.stat().st_mode, path)


def _require_file(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is {kind_of(mode)}, not a file")


def kind_of(mode: int) -> str:
    """Return what an entry of a folder is, by its mode, in words."""
    kinds = {stat.S_ISREG: "a file", stat.S_ISDIR: "a folder", stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe"}
    return next((words for test, words in kinds.items() if test(mode)), "a device or socket")


def write_text(path: Path, text: str | Iterable[str], *, inside: Path | None = None) -> None:
    """Write a text file atomically.

    :param text: whole or in pieces, of which one is in memory at a time.
    :param inside: see :func:`replacing`.
    :raises StorageError: there is no room, or no permission.
    """
    with replacing(path, sync=True, inside=inside) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)


def write_json(path: Path, value: Any, *, inside: Path | None = None) -> None:
    """Write a JSON file atomically; raises as :func:`write_text`."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n", inside=inside)


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool, inside: Path | None = None) -> Iterator[Path]:
    """Give a name at which to make a file, which takes the place of ``path`` when the block ends well.

    :param sync: wait until the disk has it, and its name, for what must survive a power failure.
    :param inside: folder above ``path`` below which no link is followed and missing folders are made; default the one
        that holds it.
    :raises StorageError: in place of an OSError.
    """
    name = f".{path.name}.{os.getpid()}{TEMPORARY}"
    with storing(path), folder_of(path, inside=inside, make=inside is not None, sync=sync) as folder:
        temporary = _below(folder, path.parent) / name
        try:
            _delete(name, folder)  # of an earlier process of the same number, or a link that waits there
            yield temporary
            if sync:
                _sync(name, folder)
            os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if sync:
                os.fsync(folder)
        finally:
            _delete(name, folder)


@contextlib.contextmanager
def folder_of(path: Path, *, inside: Path | None = None, make: bool = False, sync: bool = False) -> Iterator[int]:
    """Open the folder that holds ``path`` and yield its descriptor; below ``inside`` no link is followed.

    :param make: make the folders that are missing; ``sync``: and wait until the disk has their names.
    :raises OSError: there is no such folder, or a link on the way to it.
    """
    start = path.parent if inside is None else inside
    if make:
        make_folders(start)
    folder = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
    way = start
    try:
        for part in path.parent.relative_to(start).parts:
            way /= part
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
                    if sync:
                        os.fsync(folder)
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                raise _no_link(error, part, folder, way) from error
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def open_inside(path: Path, flags: int, *, inside: Path) -> int:
    """Open a file and return its descriptor; neither it nor a folder between it and ``inside`` may be a link.

    :param flags: of ``os.open``; with O_CREAT the folders that are missing are made.
    :raises OSError: as ``os.open``; also where something stands there that is no file.
    """
    with folder_of(path, inside=inside, make=bool(flags & os.O_CREAT)) as folder:
        try:
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)
        except OSError as error:
            raise _no_link(error, path.name, folder, path) from error
    try:
        _require_file(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def delete_others(folder: Path, keep: Callable[[str], bool], *, inside: Path) -> None:
    """Delete what is in a folder but for the names to keep; a folder that does not exist is empty already.

    :raises StorageError: it cannot be done, or there is a link on the way to the folder.
    """
    with storing(folder), contextlib.suppress(FileNotFoundError), folder_of(folder / "_", inside=inside) as opened:
        for name in os.listdir(opened):
            if not keep(name):
                _delete(name, opened)


def sync_inside(path: Path, *, inside: Path) -> None:
    """Wait until a file's content is on the disk, and its name.

    The names of the folders that hold it are :func:`sync_folders`'s, once for all files.

    :raises OSError: there is none, or a link on the way to it.
    """
    with folder_of(path, inside=inside) as folder:
        _sync(path.name, folder)
        os.fsync(folder)


def sync_folders(folder: Path, *, inside: Path) -> None:
    """Wait until the disk has the names of what is in a folder, and in those above it up to ``inside``.

    :raises OSError: there is no such folder, or a link on the way to it.
    """
    while folder.is_relative_to(inside):
        with folder_of(folder / "_", inside=inside) as opened:
            os.fsync(opened)
        folder = folder.parent


def sync_tree(folder: Path) -> None:
    """Wait until the disk has all files below a folder, and their names; links in it are left as they are.

    :raises OSError: it cannot be done.
    """
    for _, _, files, opened in os.fwalk(folder):
        for file in files:
            if not stat.S_ISLNK(os.stat(file, dir_fd=opened, follow_symlinks=False).st_mode):
                _sync(file, opened)
        os.fsync(opened)


def make_folders(path: Path) -> list[Path]:
    """Make a folder and those above it, and wait until the disk has their names; returns the new ones, innermost first.

    :raises OSError: it cannot be done.
    """
    path = path.absolute()
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    sync_names(missing)
    return missing


def sync_names(folders: Iterable[Path]) -> None:
    """Wait until the disk has the names of these folders, except in folders that may be written but not read."""
    for folder in folders:
        with contextlib.suppress(PermissionError), folder_of(folder) as above:
            os.fsync(above)


def _below(folder: int, path: Path) -> Path:
    """Return a folder that is open as a path, which leads to it whatever its name leads to by now (where /proc is)."""
    held = Path(f"/proc/self/fd/{folder}")
    return held if held.exists() else path


def _sync(name: str, folder: int) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _no_link(error: OSError, name: str, folder: int, path: Path) -> OSError:
    """Return an error that says so where it was a link that was not followed."""
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return OSError(f"{path} is a link; put the file or folder itself there")
    return error


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an OSError at writing ``path`` into a StorageError.

    :raises StorageError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        remedy = "; make room there" if error.errno in _NO_ROOM else ""
        raise StorageError(f"cannot write {path}: {error.strerror or error}{remedy}") from error


def lacks_room(error: StorageError) -> bool:
    """Whether :func:`storing` raised an error because there was no room."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROOM
