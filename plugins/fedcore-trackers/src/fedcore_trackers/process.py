"""The process of one tracker: ``python -m fedcore_trackers.process NAME RUN_DIR``.

It follows metrics.jsonl. A line on stdin says that the file may have grown; the last line says how the run ended. If
stdin ends without this last line, the run's process was killed. The tracker's output goes to its log in the run
directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from fedcore.tools import RunFiles, files
from fedcore_trackers.base import Status, TrackedRun, Tracker, create_tracker

SWITCHED_OFF = 3
"""The exit code of a tracker that raised; its memory says what."""


@dataclass
class Memory:
    """How far a tracker is. The next process of the same run continues from there.

    :param round: the first round that it has not taken.
    :param status: ``new``, ``running``, or how its process ended.
    :param error: why it was switched off.
    :param state: the tracker's own values.
    """

    round: int = 0
    status: str = "new"
    error: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Memory:
        """Read a tracker's file. Without a file, nothing has happened yet."""
        return cls(**files.parse_json(file.read_bytes())) if file.exists() else cls()

    def write(self, file: Path) -> None:
        """Write the file: a reader sees the old one or the new one.

        :raises RuntimeError: the tracker's state is not JSON.
        """
        try:
            text = json.dumps(asdict(self))
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"run.state can hold JSON only: {error}") from error
        file.parent.mkdir(exist_ok=True)
        files.write_text(file, text, sync=False)


def memory_file(directory: Path, name: str) -> Path:
    """Return a tracker's file in a run directory. Its log and lock are next to it."""
    return directory / "trackers" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.json"


def main(arguments: list[str]) -> int:
    """Run one tracker to the end of its run and return the exit code."""
    name, folder = arguments
    directory = Path(folder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run tells on stdin when it ends
    wake = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull, "rb") as nothing:  # for trackers and their processes that ask a question: they read nothing
        os.dup2(nothing.fileno(), 0)
    file = memory_file(directory, name)
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a run that was killed may still be closing
        try:
            memory = Memory.read(file)
            config = RunFiles(directory).read_config()
            if memory.status == "finished" and memory.round >= config.rounds:
                return 0
            memory.status, memory.error = "running", ""
            memory.write(file)
            tracker = create_tracker(name, config.trackers[name])
            Follower(tracker, TrackedRun(directory, config, memory.round, memory.state), memory, file).follow(wake)
        except BaseException as error:
            traceback.print_exc()
            memory = Memory.read(file)  # as last written: the error may be that the new state is not JSON
            memory.status, memory.error = "failed", f"{error}" or type(error).__name__
            memory.write(file)
            return SWITCHED_OFF
    return 0


class Follower:
    """Passes the records that a run appends to a tracker."""

    def __init__(self, tracker: Tracker, run: TrackedRun, memory: Memory, file: Path) -> None:
        self.tracker, self.run, self.memory, self.file = tracker, run, memory, file
        self._offset = 0

    def follow(self, wake: Iterable[str]) -> None:
        """Follow the run to its end."""
        self._call("start", self.run)
        self.memory.write(self.file)
        status: Status = "stopped"
        self._catch_up()
        for line in wake:
            self._catch_up()
            if line.strip() in get_args(Status):
                status = line.strip()  # type: ignore[assignment]
                break
        self._catch_up()
        summary = RunFiles(self.run.directory).read_summary() if status == "finished" else None
        self._call("finish", status, summary)
        self.memory.status = status
        self.memory.write(self.file)

    def _catch_up(self) -> None:
        """Hand over the new whole lines, and after a resume the earlier rounds that the tracker has not taken."""
        records = self.run.directory / "metrics.jsonl"
        if not records.exists():
            return
        with records.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    record = files.parse_json(line)
                    is_due = record.get("round", -1) >= self.memory.round
                except (ValueError, AttributeError):
                    continue  # damaged while the run was stopped; the run has warned about it
                if is_due:
                    self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        self._call("round", record)
        if record["metrics"]:
            self._call("evaluation", record["round"], record["metrics"])
        self.memory.round = record["round"] + 1
        self.memory.write(self.file)

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.tracker, method)(*arguments)
        except (Exception, SystemExit) as error:
            where = f" (round {self.memory.round + 1})" if method in ("round", "evaluation") else ""
            raise RuntimeError(f"{method}{where} raised {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
