"""A worker process of the local engine: ``python -m fedcore.engines.worker FD SPOOL ENGINE``.

Lives as long as its connection: when the engine's process is gone, killed even, the worker ends too. It sees to that
before it imports torch, which takes seconds.

A worker that is stopped (SIGSTOP) runs no handler and reads no socket. But it is alone in a process group that the
death of its parent, in another group of the session, leaves orphaned, and stopped members of such a group get SIGHUP
and SIGCONT (POSIX): it wakes, and ends as any other. PR_SET_PDEATHSIG with SIGKILL would end it, too, but at once:
nobody would delete the shared memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
ENGINE_DIED = signal.SIGUSR1
DYING = 5.0
"""Seconds left to a killed engine's threads: the death of the first is told, that of the last is the process's."""


def main(fd: int, spool: Path, engine: int) -> None:
    """Serve the engine, a process by its id, until it hangs up or dies."""

    def died() -> bool:
        give_up = time.monotonic() + DYING
        while os.getppid() == engine and time.monotonic() < give_up:
            time.sleep(0.005)
        return os.getppid() != engine

    def end(number: int, frame: FrameType | None) -> None:
        if died():
            shutil.rmtree(spool, ignore_errors=True)
        elif number == signal.SIGHUP:
            return  # somebody else's
        os._exit(1)  # an exception could be raised where nobody can pass it on

    signal.signal(ENGINE_DIED, end)
    signal.signal(signal.SIGHUP, end)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # not the terminal's foreground group, and may write all the same
    if sys.platform == "linux":  # the kernel ends this process, in mid-epoch too, when the engine's process dies
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ENGINE_DIED)
    dead = os.getppid() != engine
    try:
        if not dead:
            from fedcore.engines.serving import answer_frames

            dead = not answer_frames(fd, spool)  # a process that is killed hangs up before it counts as dead
    except OSError:
        dead = died()  # then another worker has removed what this one was reading
        if not dead:
            raise
    finally:
        if dead or os.getppid() != engine:
            shutil.rmtree(spool, ignore_errors=True)  # the engine could not clean up


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
