"""Processes of fedcore as /proc shows them: their children, memory, open files, shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedcore.base.process import environment
from fedcore.cli import main
from fedcore_workers import ForkedProcess, current

PAGE = os.sysconf("SC_PAGE_SIZE")


def start(*words: object, log: Path, fresh: bool = False) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start ``fedcore WORDS`` in a session of its own, by a fork if there is a server; its output goes to ``log``.

    :param fresh: never by a fork. A forked process has the allocator's options of the first process that the server
        forked, which is often a worker: huge pages, and 64 MiB more at each growth of the heap.
    """
    given, server = list(map(str, words)), None if fresh else current()
    with log.open("ab") as file:
        if server is not None:
            outputs = {1: file.fileno(), 2: file.fileno()}
            call = f"{__name__}:{run_command.__name__}"
            return server.fork(call, [given], environment=environment(), descriptors=outputs)
        return subprocess.Popen(
            [sys.executable, "-m", "fedcore", *given],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def run_command(words: list[str]) -> None:
    """Be ``fedcore WORDS``, in a forked process; the server may have begun with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["fedcore", *words]
    main()


def wait_for(
    condition: Callable[[], object], seconds: float = 60.0, every: float = 0.002, saying: object = ""
) -> float:
    """Wait until something holds; returns the seconds it took. The error ends with ``saying``, or what it returns."""
    began = time.monotonic()
    while not condition():
        said = "" if time.monotonic() < began + seconds else saying() if callable(saying) else saying
        assert time.monotonic() < began + seconds, f"still waiting after {seconds} s {said}"
        time.sleep(every)
    return time.monotonic() - began


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, those they started, and so on."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields:
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead and not yet collected does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Return a process's state, parent's id and so on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def memory(pid: int) -> int:
    """Return the bytes of a process's own memory: resident, without files and memory that it shares."""
    resident, shared = (int(field) for field in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE


def open_files(pid: int) -> int:
    """Return how many files a process holds open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_bytes(pid: int) -> int:
    """Return the size of the memory that a process shares with its workers."""
    total = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if str(file.readlink()).startswith("/memfd:fedcore") else 0
    return total


def shared_mappings(pid: int) -> int:
    """Return how many pieces of the memory that a run shares a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:fedcore")
