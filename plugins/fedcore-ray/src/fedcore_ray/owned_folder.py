"""A temporary folder that is deleted even if its process is killed: by the next process that needs one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path


class OwnedFolder:
    """A new temporary folder. If its process is killed, the next :func:`remove_abandoned` deletes it.

    The accident: a job is killed with all its processes, and its files in shared memory would stay. The process holds a
    lock on the folder, which the kernel releases when it ends. Process ids would not do: a container has numbers of its
    own and may share ``/dev/shm`` with others.

    :param parent: folder to make it in.
    :param prefix: beginning of its name; then follow the process id and random characters.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
        self._descriptor: int | None = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # no locks here: then nobody takes it for abandoned
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Delete the folder and release its lock; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders of :class:`OwnedFolder` whose processes are gone."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > 1:  # else its owner may be about to lock it
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
