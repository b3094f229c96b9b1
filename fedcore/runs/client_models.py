"""A client's own model after a run: that of a personalised method, as evaluation uses it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedcore.base.errors import ConfigError
from fedcore.base.threads import one_thread
from fedcore.engines.in_process import InProcessEngine
from fedcore.models.placement import Placement
from fedcore.runs.evaluation import evaluation_tasks
from fedcore.runs.given import DatasetObject, ModelObject, PluginObjects, given_again
from fedcore.runs.opened import OpenedRun
from fedcore.runs.start import federation, reopen
from fedcore.server.scope import ServerScope


@dataclass(frozen=True)
class ClientModel:
    """A client's own model on the CPU, contiguous, in eval mode.

    :param took_part: whether the client trained; else its model is the global one, with first personal parameters.
    """

    network: nn.Module
    took_part: bool


def client_model(
    path: Path | str,
    client: int,
    *,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    allow_code: bool = False,
) -> nn.Module:
    """Return a client's own model after a run's last checkpoint, on the CPU, in eval mode; writes nothing.

    It is the model of the protocol ``personal``, and returns (features, logits). A client that never trained has the
    global one.

    :param client: its number, from 0.
    :param model: as for :func:`fedcore.resume`, likewise ``plugins``, ``dataset`` and ``allow_code``.
    :raises ConfigError: the run's methods give clients no model of their own, or it has no such client.
    :raises RunDirectoryError: there is no run in ``path``, or it has no checkpoint.
    :raises PluginCallError: ``personal_model`` raised.
    """
    path = Path(path)
    _, given = given_again(path, model, plugins, dataset)
    with one_thread(), given.lent():
        return own_model(reopen(path, allow_code=allow_code), client).network


def own_model(opened: OpenedRun, client: int) -> ClientModel:
    """Return a client's model of a reopened run; raises as :func:`client_model`."""
    setup, path = opened.setup, opened.directory.path
    if not setup.layout.personal and not setup.plugins.implementers("personal_model"):
        raise ConfigError(f"{path} gives clients no model of their own, its global model is that of all")
    if not 0 <= client < opened.config.clients:
        raise ConfigError(f"{path} has no client {client}, its clients are 0 to {opened.config.clients - 1}")
    state = opened.last_state()
    with (
        federation(opened, InProcessEngine) as running,
        ServerScope(running, state, state.round, "evaluation") as scope,
    ):
        (task,) = evaluation_tasks(scope, [client])
        assert isinstance(running.engine, InProcessEngine)
        with running.engine.own_model(task) as network:
            try:
                taken = copy.deepcopy(network)
            except Exception as error:  # a module of a plugin can hold anything
                raise ConfigError(
                    f"the model of client {client}, a {type(network).__name__}, cannot be copied: "
                    f"{type(error).__name__}: {error}"
                ) from error
    return ClientModel(Placement.plain().model(taken).eval(), task.meta["took_part"])
