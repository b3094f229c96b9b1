"""The contract of a tracker, as one function."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcore import FedcoreError, UnknownNameError
from fedcore.tools import RunFiles, option_names, parse_options
from fedcore_testing import federate, model_bytes, name_of, records
from fedcore_trackers.base import TrackedRun, Tracker, tracker_class
from fedcore_trackers.process import Follower, Memory, memory_file

ROUNDS = 3


def check_tracker(tracker: str | type[Tracker], folder: Path, options: Mapping[str, Any] | None = None) -> None:
    """Check a tracker: its options, a run that is stopped and resumed, and a real run with its tracker process.

    It receives every round once and in order. It must not change the records, may keep only JSON, and must not fail:
    a tracker that fails is switched off.

    :param tracker: its class, or the name under which it is installed; a class that a process can import.
    :param folder: for the run directories and the tracker's other files.
    :param options: its own, for example a store in ``folder``.
    :raises AssertionError: names the defect.
    """
    name, options = name_of(tracker, "tracker"), dict(options or {})
    try:
        cls = tracker_class(name) if isinstance(tracker, str) else tracker
    except FedcoreError as error:
        raise AssertionError(str(error)) from error
    assert issubclass(cls, Tracker), f"{cls!r} is no subclass of fedcore_trackers.Tracker"
    _check_options(name, cls, options)
    plain = federate(folder, rounds=ROUNDS)
    _check_stop_and_resume(name, cls, options, plain.directory)
    notes: list[str] = []

    def listen(event: str, details: Mapping[str, Any]) -> None:
        if event == "note":
            notes.append(details["message"])

    tracked = federate(folder, rounds=ROUNDS, trackers={name: options}, notify=listen)
    assert not notes, notes[0]
    memory = Memory.read(memory_file(tracked.directory, name))
    assert (memory.round, memory.status) == (ROUNDS, "finished"), f"{name} took {memory.round} of {ROUNDS} rounds"
    assert records(tracked) == records(plain), f"{name} changes what is recorded of a run"
    assert model_bytes(tracked) == model_bytes(plain), f"{name} changes the bits of a run"


def _check_options(name: str, cls: type[Tracker], options: Mapping[str, Any]) -> None:
    try:
        parse_options(name, cls, options, kind="tracker")
    except FedcoreError as error:
        raise AssertionError(f"{name} cannot be made with {dict(options)}: {error}") from error
    undescribed = [
        option for option, field in option_names(cls).items() if not cls.Options.model_fields[field].description
    ]
    assert not undescribed, f"{name}: option {undescribed[0]!r} has no description; fedcore plugins show prints it"
    try:
        parse_options(name, cls, {**options, "no_such_option": 1}, kind="tracker")
    except UnknownNameError:
        return
    raise AssertionError(f"{name} accepts options that it does not have; derive Options from TrackerOptions")


def _check_stop_and_resume(name: str, cls: type[Tracker], options: Mapping[str, Any], directory: Path) -> None:
    """Pass a finished run in two parts, as two processes would, and check that the records are not changed."""
    config = RunFiles(directory).read_config()
    file = directory / "metrics.jsonl"
    whole = file.read_text(encoding="utf-8")
    memory = Memory()
    memory_file(directory, name).parent.mkdir(exist_ok=True)
    for part, end in ((whole.partition("\n")[0] + "\n", "stopped"), (whole, "finished")):
        file.write_text(part, encoding="utf-8")
        tracker = cls(parse_options(name, cls, options, kind="tracker"))
        run = TrackedRun(directory, config, memory.round, memory.state)
        try:
            _CheckedFollower(tracker, run, memory, memory_file(directory, name)).follow([f"{end}\n"])
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        kept = json.loads(json.dumps(memory.state))
        assert kept == memory.state, f"{name} keeps {memory.state} in run.state, which comes back as {kept}: JSON only"


class _CheckedFollower(Follower):
    """Checks that the tracker does not change its arguments, except ``run.state``."""

    def _call(self, method: str, *arguments: Any) -> None:
        before = arguments if method == "start" else copy.deepcopy(arguments)
        super()._call(method, *arguments)
        assert arguments == before, f"{type(self.tracker).__name__} edits what it is given by {method}"
