"""What a run is put together from: dealt for a new run, or read back from a run's directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, RunDirectoryError
from fedcore.base.safe_yaml import read_yaml
from fedcore.base.tensors import clone
from fedcore.data import DECLARED, Dataset, Partition, load_partition
from fedcore.data.content import data_digest
from fedcore.hooks.setup import Setup
from fedcore.runs.autotune import tuned
from fedcore.runs.checkpoint import Report
from fedcore.runs.directory import RunDirectory, installed_versions
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore.runs.saved import HOW_TO_CHANGE, Binding, SavedConfig, bound, partition_digest
from fedcore.runs.trackers.base import resolve_trackers
from fedcore.runs.trust import check_code, check_places, check_places_inside, code_in, places_in
from fedcore.server.state import ServerState

CHANGEABLE = frozenset({"rounds", "workers", "data_dir", "device", "client_timeout"})
"""Options that may take another value when a run goes on; of these only rounds and device can change its bits."""


@dataclass(frozen=True)
class Opened:
    """A run that can be trained or evaluated: all but its engine.

    :param config: every ``auto`` resolved.
    :param binding: what the run's files have to go with.
    :param values: the options as config.yaml has them; ``versions`` what was installed.
    :param notes: what people should know of the directory.
    :param changes: names of options that take other values from here on.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    setup: Setup
    directory: RunDirectory
    binding: Binding
    values: Mapping[str, Any]
    versions: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The options that take other values from here on, with those before and after."""
        now = self.config.model_dump(mode="json")
        return {name: (self.values.get(name), now[name]) for name in sorted(self.changes)}

    def copied(self, out: Path) -> Opened:
        """Return the same run in a new directory.

        :raises RunDirectoryError: it exists and holds something, or cannot be written.
        """
        made = RunDirectory.create(out, [])
        try:
            shutil.copytree(self.directory.path, made.path, symlinks=True, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            made.discard()
            raise RunDirectoryError(f"{self.directory.path} cannot be copied to {out}: {error}") from error
        made.checkpoints.binding = self.binding
        config = self.config.model_copy(update={"out": made.path})
        setup = replace(self.setup, config=config)
        values, changes = {**self.values, "out": str(self.directory.path)}, (*self.changes, "out")
        return replace(self, config=config, setup=setup, directory=made, values=values, changes=changes)

    def recover(self, report: Report) -> ServerState | None:
        """Return what to go on from, None for the start, and put the directory back to it.

        A run that is finished goes on from where its training ended when it is to have more rounds.

        :raises RunDirectoryError: there are checkpoints, but none can be used, or it has had as many rounds already.
        """
        state = self.directory.recover(report, self.check)
        if "rounds" not in self.changes or state is None:
            return state
        rounds = self.config.rounds
        if rounds < state.round:
            raise RunDirectoryError(f"--rounds {rounds}: {self.directory.path} has had {state.round} rounds already")
        if state.phase == "train" or rounds == state.round:
            return replace(state, phase="post_train") if rounds == state.round and state.phase == "train" else state
        if state.phase == "done":
            state = self.directory.recover(report, self.check, phase="post_train")
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
        found = self.directory.checkpoints.found
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


def begin(config: RunConfig, given: Partition | None = None, *, reached: bool = False) -> Opened:
    """Prepare a new run and write its directory: configuration and partition.

    :param given: who holds which samples, in place of the configured dealing.
    :param reached: the caller has an engine for clients that hold data of their own.
    :raises ConfigError: and its kin, before anything is written.
    """
    config = config.model_copy(update={"trackers": resolve_trackers(config.trackers)})
    config, dataset = resolve_config(config)
    config, partition = _dealt(config, dataset, given, reached)
    setup = Setup.build(config, dataset)
    if config.autotune:
        config = tuned(config, setup.model, dataset)
    directory = RunDirectory.create(config.out, list(config.plugins), with_clients=not partition.is_declared)
    config = config.model_copy(update={"out": directory.path})
    partition.save(directory.partition_file)
    values = read_yaml(yaml.safe_dump(config.model_dump(mode="json")))  # as they will be read
    binding = Binding(bound(values), _digest_of(partition), data_digest(dataset))
    directory.checkpoints.binding = binding
    versions = installed_versions()
    directory.write_config(values, binding, versions)  # last: it makes the folder a run to be resumed
    setup = replace(setup, config=config)
    return Opened(config, dataset, partition, setup, directory, binding, values, versions)


def reopen(
    path: Path,
    *,
    allow_code: bool,
    allow_outside: bool = True,
    reached: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Opened:
    """Read a run's directory.

    :param changes: options that take other values than in its configuration.
    :param allow_code: see :func:`fedcore.runs.experiment.resume`.
    :param allow_outside: likewise; where no tracker will be started, it does not matter what they would write.
    :param reached: as for :func:`begin`.
    :raises RunDirectoryError: there is no run in ``path``, or its files do not belong together.
    :raises ConfigError: it needs one of the permissions, or an engine that reaches its clients.
    """
    directory = RunDirectory.open(path)
    saved, source = directory.read_saved(), path / "config.yaml"
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    if not changes.keys() <= CHANGEABLE:
        raise ConfigError(f"only {', '.join(sorted(CHANGEABLE))} can change when a run goes on")
    config = RunConfig.create({**saved.values, **changes, "out": str(directory.path)})
    check_code(code_in(config), source, allow=allow_code)
    if not allow_outside:
        check_places(places_in(config, directory.path), source, allow=False)
        check_places_inside(config, directory.path)
    config, dataset = resolve_config(config)
    partition = load_partition(directory.partition_file, dataset)
    if partition.is_declared:
        _require_reached(reached, path)
        directory = directory.without_clients()
    binding = Binding(bound(saved.values), _digest_of(partition), data_digest(dataset), saved.changes)
    directory.checkpoints.binding = binding
    notes = _check_digests(saved, binding, directory.path)
    setup = Setup.build(config, dataset)
    return Opened(
        config, dataset, partition, setup, directory, binding, saved.values, saved.versions, notes, tuple(changes)
    )


def _check_digests(saved: SavedConfig, binding: Binding, path: Path) -> tuple[str, ...]:
    """Refuse a partition or data that config.yaml was not written with; returns what could not be looked at."""
    if saved.digests is None:
        return (
            f"{path} is of an earlier version, which wrote no digests: whether its options, its partition and the data "
            "are those that it was begun with is not known",
        )
    what = {"partition": "partition.json", "data": "the data set's content"}
    differing = [words for name, words in what.items() if saved.digests[name] != binding.digests()[name]]
    if differing:
        raise RunDirectoryError(
            f"{path} does not hold together, it was begun with something else: {' and '.join(differing)}. "
            f"{HOW_TO_CHANGE}"
        )
    return ()


def _digest_of(partition: Partition) -> str:
    return partition_digest(partition.sha256, partition.info)


def _dealt(config: RunConfig, dataset: Dataset, given: Partition | None, reached: bool) -> tuple[RunConfig, Partition]:
    """Return who holds which samples, and the configuration that says so."""
    if given is None:
        return config, resolve_partition(config, dataset)
    if given.num_clients != config.clients:
        raise ConfigError(f"clients is {config.clients}, but the partition is of {given.num_clients} clients")
    if given.is_declared:
        _require_reached(reached, "this federation")
        config = config.model_copy(update={"partition": DECLARED})
    return config, given


def _require_reached(reached: bool, what: object) -> None:
    """Refuse an engine of the configuration for clients that hold data of their own: it cannot reach them."""
    if not reached:
        raise ConfigError(
            f"the clients of {what} hold their own data; fedcore federate server reaches them, and "
            "fedcore federate server --resume RUN_DIR goes on"
        )
