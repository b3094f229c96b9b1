"""Run one command to its end, with all its descendants watched and, if need be, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    :param seconds: from its start to its end.
    :param peak_mib: most memory of all its processes together, sampled; None where the system does not say.
    """

    code: int
    seconds: float
    peak_mib: float | None
    timed_out: bool


def watched(
    command: list[str],
    *,
    log: Path,
    output: Path,
    environment: Mapping[str, str],
    timeout: float,
    every: float = 1.0,
    patience: float = 10.0,
) -> Ended:
    """Run a command in the folder of its log, its standard output in one file and its errors in another.

    :param timeout: seconds after which it is ended.
    :param every: seconds between samples of the memory.
    :param patience: seconds that processes it leaves behind have to end by themselves.
    """
    began = time.monotonic()
    peak: float | None = None
    seen: set[int] = set()
    timed_out = False
    with log.open("wb") as errors, output.open("wb") as lines:
        process = subprocess.Popen(  # noqa: S603 - the runners' commands
            command, stdout=lines, stderr=errors, stdin=subprocess.DEVNULL, env=environment, cwd=log.parent
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every)
                    break
                tree = descendants(process.pid)
                seen |= tree
                if used := memory_mib({process.pid, *tree}):
                    peak = max(peak or 0.0, used)
                if time.monotonic() - began > timeout:
                    timed_out = True
                    break
        finally:
            seconds = time.monotonic() - began
            if process.poll() is None:
                seen |= descendants(process.pid)
                process.kill()
                process.wait()
            _end(seen, patience)
    return Ended(process.returncode, seconds, peak, timed_out)


def descendants(root: int) -> set[int]:
    """Return the processes below one; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold spaces.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def memory_mib(processes: set[int]) -> float:
    """Return the proportional set size (PSS) of all processes: what several have in common counts once."""
    total = 0.0
    for process in processes:
        with suppress(OSError, ValueError, StopIteration):
            total += field_mib(f"{process}/smaps_rollup", "Pss")
    return total


def field_mib(file: str, name: str) -> float:
    """Return what a file below /proc says of a name.

    :raises OSError: there is no such file.
    :raises StopIteration: it does not have the name.
    """
    lines = (_PROC / file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _end(processes: set[int], patience: float) -> None:
    # Ray's daemons may outlive the driver for a moment; what this command started must not run beside the next one.
    if left := _left_after(processes, patience):
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _left_after(left, 10.0)


def _left_after(processes: set[int], seconds: float) -> set[int]:
    limit = time.monotonic() + seconds
    while (left := {process for process in processes if _alive(process)}) and time.monotonic() < limit:
        time.sleep(0.1)
    return left


def _alive(process: int) -> bool:
    try:
        state = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"
