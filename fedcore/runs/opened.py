"""A run with its directory, ready for an engine: where it goes on from, and what its files have to agree with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedcore.base.config import RunConfig
from fedcore.base.errors import RunDirectoryError
from fedcore.base.tensors import clone
from fedcore.data import Dataset, Partition
from fedcore.hooks.setup import Setup
from fedcore.runs.checkpoint import Note
from fedcore.runs.directory import RunDirectory
from fedcore.runs.saved import HOW_TO_CHANGE, Binding
from fedcore.server.state import ServerState


@dataclass(frozen=True)
class OpenedRun:
    """A run that can be trained or evaluated as soon as an engine is started.

    :param binding: what the run's files have to agree with.
    :param values: the options as config.yaml has them; ``versions`` what was installed.
    :param notes: messages about the directory for the user.
    :param changes: names of options that take other values from here on.
    """

    setup: Setup
    dataset: Dataset
    partition: Partition
    directory: RunDirectory
    binding: Binding
    values: Mapping[str, Any]
    versions: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The run's configuration, as everything in this process uses it."""
        return self.setup.config

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The options that take other values from here on, with those before and after."""
        now = self.config.model_dump(mode="json")
        return {name: (self.values.get(name), now[name]) for name in sorted(self.changes)}

    def recover(self, note: Note) -> ServerState | None:
        """Return what to go on from, None for the start, and put the directory back to it.

        A run that is finished goes on from where its training ended when it is to have more rounds, or more patience.

        :raises RunDirectoryError: there are checkpoints, but none can be used, or it has had as many rounds already.
        """
        state = self.directory.recover(note, self.check)
        if state is None or not {"rounds", "patience"}.intersection(self.changes):
            return state
        rounds = self.config.rounds
        if rounds < state.round:
            raise RunDirectoryError(f"--rounds {rounds}: {self.directory.path} has had {state.round} rounds already")
        if state.phase == "train" or rounds == state.round:
            return replace(state, phase="post_train") if rounds == state.round and state.phase == "train" else state
        if state.phase == "done":
            state = self.directory.recover(note, self.check, phase="post_train")
        if state is None:
            raise RunDirectoryError(
                f"--rounds {rounds}: {self.directory.path} is finished, and the checkpoint of before its end, from "
                "which more rounds could go on, is missing"
            )
        self.directory.reopen_finished()
        return replace(state, phase="train")

    def record_changes(self, state: ServerState) -> None:
        """Write the options that take other values from here on, and what they were, into config.yaml."""
        if not self.changes:
            return
        now = self.config.model_dump(mode="json")
        values = {**self.values, **{name: now[name] for name in self.changes}}
        binding = self.binding.changed(values, state.round, self.changed)
        self.directory.checkpoints.binding = binding
        self.directory.write_config(values, binding, self.versions)

    def initial(self) -> ServerState:
        """Return the state before the first round."""
        return ServerState(model=clone(self.setup.model.state_dict()))

    def check(self, state: ServerState) -> None:
        """Refuse a checkpoint of another run, or of another model than the configuration's.

        :raises RunDirectoryError: names what differs.
        """
        found = self.directory.checkpoints.found.get("binding")
        differing = self.binding.differences(found) if found is not None else []
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
