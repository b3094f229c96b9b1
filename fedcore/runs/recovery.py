"""Put a run's directory back to its last usable checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedcore.base.errors import RunDirectoryError
from fedcore.runs.checkpoint import Note
from fedcore.runs.directory import RunDirectory
from fedcore.server.state import ServerState
from fedcore.storage.files import TEMPORARY

KEPT_LINES = "The other lines are kept, and the run goes on: training does not read them"


def recover(
    directory: RunDirectory,
    note: Note,
    check: Callable[[ServerState], None] = lambda state: None,
    *,
    phase: str | None = None,
) -> ServerState | None:
    """Return what a run goes on from, None for the start, and put its directory back to it.

    :param note: told of damaged files that were passed over.
    :param check: raises an error for a state that is none of this run, before anything is written.
    :param phase: go on from a checkpoint of this phase only.
    :raises RunDirectoryError: there are checkpoints, but none can be used.
    """
    metrics, checkpoints = directory.metrics, directory.checkpoints

    def check_content(state: ServerState, meta: Mapping[str, Any]) -> None:
        metrics.check(state.metrics_bytes, meta["metrics_sha256"])

    def check_length(state: ServerState, meta: Mapping[str, Any]) -> None:
        metrics.check_length(state.metrics_bytes)

    try:
        state = checkpoints.load(check=check_content, note=note, phase=phase)
    except RunDirectoryError:
        damage = metrics.damage()
        if not damage:
            raise  # an older checkpoint does not help either, but the round's records are all that is lost
        state = checkpoints.load(check=check_length, note=note, phase=phase)
        note(f"{metrics.path}: {damage}. {KEPT_LINES}")
    if state is not None:
        check(state)
    _note_sessions(directory, note)
    metrics.restore(state.metrics_bytes if state else 0)  # what came after it will be written again
    directory.sessions.restore()
    checkpoints.tidy()
    for path in directory.path.glob(f".*{TEMPORARY}"):
        path.unlink(missing_ok=True)
    return state


def _note_sessions(directory: RunDirectory, note: Note) -> None:
    """Say where sessions.jsonl is not what the checkpoint counts; nothing reads it for training."""
    counted, sessions = directory.checkpoints.found.get("sessions"), directory.sessions
    try:
        if isinstance(counted, dict):
            sessions.check(int(counted["bytes"]), str(counted["sha256"]))
        if damage := sessions.damage():
            raise RunDirectoryError(f"sessions.jsonl is {damage}")
    except RunDirectoryError as error:
        note(f"{directory.path}: {error}. {KEPT_LINES}")
