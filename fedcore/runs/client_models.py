"""A client's own model after a run: that of a personalised method, as evaluation uses it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from fedcore.base.errors import ConfigError
from fedcore.engines.in_process import InProcessEngine
from fedcore.models.placement import Placement
from fedcore.runs.evaluation import evaluation_tasks
from fedcore.runs.run import Run
from fedcore.server.scope import ServerScope


@dataclass(frozen=True)
class ClientModel:
    """A client's own model on the CPU, contiguous, in eval mode.

    :param took_part: whether the client trained; else its model is the global one, with first personal parameters.
    """

    network: nn.Module
    took_part: bool


def own_model(run: Run, client: int) -> ClientModel:
    """Return a client's model of a run; raises as :func:`fedcore.client_model`."""
    setup, path = run.setup, run.directory.path
    if not setup.layout.personal and not setup.plugins.implementers("personal_model"):
        raise ConfigError(f"{path} gives clients no model of their own, its global model is that of all")
    if not 0 <= client < run.config.clients:
        raise ConfigError(f"{path} has no client {client}, its clients are 0 to {run.config.clients - 1}")
    state = run.last_state()
    with (
        run.federation(InProcessEngine) as running,
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
