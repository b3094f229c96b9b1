"""A run with its directory, ready for an engine: where it goes on from, and what its files have to agree with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedcore.base.config import RunConfig
from fedcore.base.errors import RunDirectoryError
from fedcore.base.tensors import clone
from fedcore.client.setup import Setup
from fedcore.data import Dataset, Partition
from fedcore.runs.checkpoint import Note
from fedcore.runs.directory import RunDirectory
from fedcore.runs.saved import HOW_TO_CHANGE, ConfigFile
from fedcore.runs.training import out_of_patience
from fedcore.server.state import ServerState
from fedcore.storage.files import TEMPORARY

KEPT_LINES = "The other lines are kept, and the run goes on: training does not read them"


@dataclass(frozen=True)
class OpenedRun:
    """A run that can be trained or evaluated as soon as an engine is started.

    :param file: its config.yaml, with what the run's files have to agree with.
    :param changes: names of options that take other values from here on.
    """

    setup: Setup
    dataset: Dataset
    partition: Partition
    directory: RunDirectory
    file: ConfigFile
    changes: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The run's configuration, as everything in this process uses it."""
        return self.setup.config

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The options that take other values from here on, with those before and after."""
        now = self.config.model_dump(mode="json")
        return {name: (self.file.values.get(name), now[name]) for name in sorted(self.changes)}

    def recover(self, note: Note) -> ServerState | None:
        """Return what to go on from, None for the start, and put the directory back to it.

        A run that is finished goes on from where its training ended when it is to have more rounds, or more patience.

        :raises RunDirectoryError: there are checkpoints, but none can be used, or it has had as many rounds already.
        """
        state = recover(self.directory, note, self.check)
        if state is None or not {"rounds", "patience"}.intersection(self.changes):
            return state and self._in_phase(state)
        rounds = self.config.rounds
        if rounds < state.round:
            raise RunDirectoryError(f"--rounds {rounds}: {self.directory.path} has had {state.round} rounds already")
        if state.phase == "train" or rounds == state.round:
            return replace(state, phase="post_train") if rounds == state.round and state.phase == "train" else state
        if state.phase == "done":
            state = recover(self.directory, note, self.check, phase="post_train")
        if state is None:
            raise RunDirectoryError(
                f"--rounds {rounds}: {self.directory.path} is finished, and the checkpoint of before its end, from "
                "which more rounds could go on, is missing"
            )
        self.directory.reopen_finished()
        return replace(state, phase="train")

    def _in_phase(self, state: ServerState) -> ServerState:
        """Return a state in the phase that rounds and patience put it in, which may have changed since it was saved."""
        if state.phase == "train" and state.round >= self.config.rounds:
            return replace(state, phase="post_train")
        ended = state.round >= self.config.rounds or out_of_patience(self.config, state)
        return replace(state, phase="train") if state.phase == "post_train" and not ended else state

    def last_state(self, note: Note = lambda message: None) -> ServerState:
        """Return the state of the last checkpoint; writes nothing.

        :param note: told of damaged files that were passed over.
        :raises RunDirectoryError: there is no checkpoint, or it is not of this run.
        """
        state = self.directory.checkpoints.load(note=note)
        if state is None:
            raise RunDirectoryError(
                f"{self.directory.path} has no checkpoint yet; first run: {self.directory.how_to_resume}"
            )
        self.check(state)
        return state

    def record_changes(self, state: ServerState) -> None:
        """Write the options that take other values from here on, and what they were, into config.yaml."""
        if not self.changes:
            return
        file = self.file.changed(self.changed, state.round)
        self.directory.checkpoints.binding = file.binding
        self.directory.write_config(file)

    def initial(self) -> ServerState:
        """Return the state before the first round."""
        return ServerState(model=clone(self.setup.model.state_dict()))

    def check(self, state: ServerState) -> None:
        """Refuse a checkpoint of another run, or of another model than the configuration's.

        :raises RunDirectoryError: names what differs.
        """
        differing = self.file.binding.differences(self.directory.checkpoints.found.get("binding"))
        if differing:
            raise RunDirectoryError(
                f"{self.directory.path} does not hold together, its checkpoint was written with something else: "
                f"{'; '.join(differing)}. {HOW_TO_CHANGE}"
            )

        def described(model: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
            return {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()}

        own, found = described(self.setup.model.state_dict()), described(state.model)
        wrong = [name for name in sorted({*own, *found}) if own.get(name) != found.get(name)]
        if wrong:
            raise RunDirectoryError(
                f"the checkpoint in {self.directory.path} is not of the model that config.yaml describes: they differ "
                f"in {', '.join(wrong[:3])}{' and others' * (len(wrong) > 3)}"
            )


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
