"""Temporary folders that are deleted when their process is gone, however it ended.

The owner holds a lock on its folder, which the kernel releases when the process dies. Process ids would not do: a
container has numbers of its own and may share ``/dev/shm`` or a temporary folder with others.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

OVERFLOW = "overflow"
"""Name of a link in one such folder to another, which is deleted with it: for what finds no room in the first."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_held: set[int] = set()


class OwnedFolder:
    """A new temporary folder, locked by this process until it ends.

    Where the file system has no locks for folders, nobody takes it for abandoned, and it may stay behind.

    :param parent: folder to make it in.
    :param prefix: beginning of its name; what follows is the process id, the kernel and random characters.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-{_kernel()}-", dir=parent))
            with contextlib.suppress(FileNotFoundError):
                self._descriptor = os.open(self.path, _FOLDER)
                with contextlib.suppress(OSError):  # no locks here; or the process that is about to delete it has it
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if self.path.exists():
                    break
                os.close(self._descriptor)  # it was deleted as abandoned before it was locked
        _held.add(self._descriptor)

    def remove(self) -> None:
        """Delete the folder and release its lock; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)


def delete(path: Path) -> None:
    """Delete another process's folder, and the one that it overflows to."""
    shutil.rmtree((path / OVERFLOW).resolve(), ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders of :class:`OwnedFolder` whose processes on this machine are gone."""
    for path in parent.glob(f"{prefix}*-{_kernel()}-*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            descriptor = os.open(path, _FOLDER)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


@functools.cache
def _kernel() -> str:
    """Return what names the running kernel: the locks of another host that shares the folder may not be seen here.

    Containers of one host share its kernel, and its locks, but not its host name.
    """
    name = _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    return hashlib.sha256(name.strip().encode()).hexdigest()[:6]


def _let_go() -> None:
    """Release the locks in a fork: it may live longer than the owner."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
