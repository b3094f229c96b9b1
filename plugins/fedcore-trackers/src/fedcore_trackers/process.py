"""The process of one tracker: ``python -m fedcore_trackers.process NAME RUN_DIR``.

Follows metrics.jsonl: every line on stdin says that it may have grown, the last one how the run ended; without it the
run's process was killed. What the tracker prints goes to its log in the run directory.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from fedcore.base.files import parse_record
from fedcore.runs.saved import SavedConfig
from fedcore_trackers.base import Status, TrackedRun, Tracker, create_tracker
from fedcore_trackers.memory import Memory, memory_file

SWITCHED_OFF = 3
"""The exit code of a tracker that raised; its memory says what."""


def main(arguments: list[str]) -> int:
    """Run one tracker to the end of its run; returns the exit code."""
    name, folder = arguments
    directory = Path(folder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides; its end is the end of stdin
    wake = _private_stdin()
    file = memory_file(directory, name)
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a run that was killed may still be closing
        try:
            memory = Memory.read(file)
            config = SavedConfig.read(directory / "config.yaml").config(directory)
            if memory.status == "finished" and memory.round >= config.rounds:
                return 0
            memory.status, memory.error = "running", ""
            memory.write(file)
            tracker = create_tracker(name, config.trackers[name])
            Follower(tracker, TrackedRun(directory, config, memory.round, memory.state), memory, file).follow(wake)
        except BaseException as error:
            traceback.print_exc()
            memory = Memory.read(file)  # as it was written last: what raised may be a state that is no JSON
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
        summary = self.run.directory / "summary.json"
        self._call("finish", status, parse_record(summary.read_bytes()) if status == "finished" else None)
        self.memory.status = status
        self.memory.write(self.file)

    def _catch_up(self) -> None:
        """Hand over the whole lines that are new; a resumed run's earlier ones were taken, or are made up for."""
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
                    record = parse_record(line)
                except ValueError:
                    continue  # damaged while the run was stopped, which the run has said
                if record.get("round", -1) >= self.memory.round:
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


def _private_stdin() -> Iterable[str]:
    """Return the channel on stdin, and replace stdin by an empty one for trackers that read it."""
    wake = os.fdopen(os.dup(0), encoding="ascii")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return wake


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
