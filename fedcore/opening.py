"""What a run is put together from: dealt for a new run, or read back from a run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedcore.autotune import tuned
from fedcore.config import RunConfig
from fedcore.data import DECLARED, Dataset, Partition, load_partition
from fedcore.errors import ConfigError, RunDirectoryError
from fedcore.prepare import resolve_config, resolve_partition
from fedcore.problem import Problem
from fedcore.rundir import RunDirectory
from fedcore.state import ServerState
from fedcore.tensors import clone
from fedcore.trackers.base import resolve_trackers
from fedcore.trust import check_code, check_places, code_in, places_in


@dataclass(frozen=True)
class Opened:
    """A run that can be trained or evaluated: all but its engine.

    :param config: every ``auto`` resolved.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    problem: Problem
    directory: RunDirectory

    def initial(self) -> ServerState:
        """Return the state before the first round."""
        return ServerState(model=clone(self.problem.model.state_dict()))

    def check(self, state: ServerState) -> None:
        """Refuse a checkpoint of another model than the configuration's; its own pass whatever their values.

        :raises RunDirectoryError: names the first tensors that differ.
        """

        def described(model: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
            return {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()}

        own, found = described(self.problem.model.state_dict()), described(state.model)
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
    problem = Problem.build(config, dataset)
    if config.autotune:
        config = tuned(config, problem.model, dataset)
    directory = RunDirectory.create(config.out, list(config.plugins), with_clients=not partition.is_declared)
    config = config.model_copy(update={"out": directory.path})
    partition.save(directory.partition_file)
    directory.write_config(config)  # last: it is what makes the folder a run that can be resumed
    return Opened(config, dataset, partition, replace(problem, config=config), directory)


def reopen(path: Path, *, allow_code: bool, allow_outside: bool = True, reached: bool = False) -> Opened:
    """Read a run's directory.

    :param allow_code: see :func:`fedcore.experiment.resume`.
    :param allow_outside: likewise; where no tracker will be started, it does not matter what they would write.
    :param reached: as for :func:`begin`.
    :raises RunDirectoryError: there is no run in ``path``.
    :raises ConfigError: it needs one of the permissions, or an engine that reaches its clients.
    """
    directory = RunDirectory.open(path)
    config, source = directory.read_config(), path / "config.yaml"
    check_code(code_in(config), source, allow=allow_code)
    if not allow_outside:
        check_places(places_in(config, directory.path), source, allow=False)
    config, dataset = resolve_config(config)
    partition = load_partition(directory.partition_file, dataset)
    if partition.is_declared:
        _require_reached(reached, path)
        directory = directory.without_clients()
    return Opened(config, dataset, partition, Problem.build(config, dataset), directory)


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
