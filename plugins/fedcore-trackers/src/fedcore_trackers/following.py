"""The run's side of tracking: a process per tracker. It is woken after every round; the run waits for it at its end.

The core finds this module by the entry point ``processes`` of the group ``fedcore.tracking``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedcore import RunConfig
from fedcore.tools import process
from fedcore_trackers.base import Status, TrackerOptions, resolve_trackers
from fedcore_trackers.process import SWITCHED_OFF, Memory, memory_file

__all__ = ["resolve_trackers", "tracked"]

Notify = Callable[[str, Mapping[str, Any]], None]


@contextmanager
def tracked(config: RunConfig, directory: Path, notify: Notify) -> Iterator[Notify]:
    """Start a run's trackers and yield a ``notify`` that also wakes them. They are closed when the block ends.

    A problem with a tracker is not raised. It is a ``note`` once, and the tracker is switched off.
    """
    processes = [TrackerProcess(name, options, directory, notify) for name, options in config.trackers.items()]
    status: Status | None = None

    def wake(event: str, details: Mapping[str, Any]) -> None:
        nonlocal status
        if event == "round":
            for each in processes:
                each.say("")
        elif event in ("done", "stopped"):
            status = "finished" if event == "done" else "stopped"
        notify(event, details)

    try:
        yield wake
        status = status or "stopped"  # a caller that trains round by round does not train the remaining rounds
    except KeyboardInterrupt:
        status = status or "stopped"
        raise
    finally:
        _close(processes, status or "failed")


class TrackerProcess:
    """The process of one tracker; after its first problem it is switched off."""

    def __init__(self, name: str, options: Mapping[str, Any], directory: Path, notify: Notify) -> None:
        self.name, self.notify = name, notify
        self.file = memory_file(directory, name)
        patience = options.get("patience")  # unchecked for a tracker that does not load
        self.patience: float = patience if isinstance(patience, int | float) else TrackerOptions().patience
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(  # noqa: S603 - our own module, arguments of our own making
                    process.python_command("fedcore_trackers.process", name, str(directory)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is the run's business
                    env=process.environment(),
                )
            assert self.process.stdin is not None
            os.set_blocking(self.process.stdin.fileno(), False)  # one that hangs must not hold up the run
        except OSError as error:
            self._switch_off(str(error))

    @property
    def log(self) -> Path:
        """What the tracker printed."""
        return self.file.with_suffix(".log")

    def say(self, text: str) -> None:
        """Send a line: an empty one after each round, at the end the run's status. Tells if the tracker has failed."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        with suppress(OSError):  # the process has ended, which poll tells, or hangs: it has not read 65,536 lines
            os.write(self.process.stdin.fileno(), f"{text}\n".encode())
        if self.process.poll():
            self._switch_off(self._why(self.process.returncode))

    def wait(self, deadline: float) -> None:
        """Wait until the tracker has ended, or until the deadline (monotonic)."""
        if self.process is None:
            return
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill(f"it did not finish within {self.patience:g} s; to wait longer: --set {self.name}.patience=300")
            return
        if code:
            self._switch_off(self._why(code))
        else:
            self._forget()

    def kill(self, reason: str) -> None:
        """End the process and its children at once, and tell why."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._switch_off(reason)

    def _why(self, code: int) -> str:
        if code == SWITCHED_OFF:
            with suppress(OSError, ValueError, TypeError):
                return Memory.read(self.file).error
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}"

    def _switch_off(self, reason: str) -> None:
        self._forget()
        message = (
            f"tracker {self.name!r} is switched off: {reason.rstrip('. ')}. The run is not affected; log: {self.log}"
        )
        self.notify("note", {"message": message})

    def _forget(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None


def _close(processes: list[TrackerProcess], status: Status) -> None:
    began = time.monotonic()
    for each in processes:  # before the wait for the first one
        each.say(status)
    try:
        for each in processes:
            each.wait(began + each.patience)
    except KeyboardInterrupt:
        for each in processes:
            each.kill("Ctrl-C came before it had finished")
