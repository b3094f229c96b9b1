"""A worker process of the local engine: ``python -m fedcore.engines.worker FD SPOOL ENGINE``.

A worker ends with its connection, also when the engine's process is killed. It installs the handlers for that before it
imports torch, which takes seconds.

A stopped worker (SIGSTOP) runs no handler and reads no socket. It is alone in a process group, which becomes orphaned
when its parent, in another group of the same session, dies. POSIX sends SIGHUP and SIGCONT to stopped members of an
orphaned group, so the worker wakes and ends like any other. PR_SET_PDEATHSIG with SIGKILL would end it, too, but then
the shared files would not be deleted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from fedcore.base.files import delete
from fedcore.base.process import end_without_collecting, importing

PR_SET_PDEATHSIG = 1
ENGINE_DIED = signal.SIGUSR1
DYING = 5.0
"""Seconds to wait for a killed engine: the signal comes when its first thread dies, the process ends with the last."""


def main(fd: int, spool: Path, engine: int) -> None:
    """Serve the engine, given by its process id, until it closes the connection or dies."""

    def died() -> bool:
        give_up = time.monotonic() + DYING
        while os.getppid() == engine and time.monotonic() < give_up:
            time.sleep(0.005)
        return os.getppid() != engine

    def end(number: int, frame: FrameType | None) -> None:
        if died():
            delete(spool)
        elif number == signal.SIGHUP:
            return  # not caused by the engine's death
        os._exit(1)  # an exception could be raised in code that swallows it

    signal.signal(ENGINE_DIED, end)
    signal.signal(signal.SIGHUP, end)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process group may write to the terminal
    if sys.platform == "linux":  # the kernel signals the engine's death, also during an epoch
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ENGINE_DIED)
    dead = os.getppid() != engine
    try:
        if not dead:
            with importing():
                from fedcore.engines.serving import answer_frames

            dead = not answer_frames(fd, spool)  # a killed process closes its sockets before its parent changes
    except OSError:
        dead = died()  # then another worker has deleted a file that this one was reading
        if not dead:
            raise
    finally:
        if dead or os.getppid() != engine:
            delete(spool)  # the engine could not clean up


def begin(fd: int, spool: str) -> None:
    """Serve the parent, from a fork of another process."""
    main(fd, Path(spool), os.getppid())


if __name__ == "__main__":
    end_without_collecting()
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
