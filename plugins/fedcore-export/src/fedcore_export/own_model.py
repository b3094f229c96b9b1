"""A client's own model after a run: the model of the protocol ``personal``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from torch import nn

from fedcore import ConfigError
from fedcore import client as clients
from fedcore.engines import ClientTask, InProcessEngine
from fedcore.models import Placement, copied
from fedcore.server import ServerScope
from fedcore.tools import Run, evaluation_tasks


class _Engine(InProcessEngine):
    """Makes the model that an evaluation would use, in the place of its counts."""

    def own_model(self, task: ClientTask) -> nn.Module:
        """Return a copy of the client's own model; it is on the device."""
        runtime, shared = self._runtime.of(task.client), self._shared.get(task.shared or "")
        with closing(runtime.session(task.complete(), shared, read_only="personal_model")) as session:
            return copied(clients.own_model(session, took_part=task.meta["took_part"]))


def own_model(run: Run, client: int, note: Callable[[str], None]) -> tuple[nn.Module, bool]:
    """Return a client's model, see :func:`fedcore.client_model`, and whether the client has trained.

    If it has not, personal parameters are initial ones.

    :param note: called with a message if the run's last checkpoint is damaged or missing.
    """
    path = run.directory.path
    if not run.setup.has_own_models:
        raise ConfigError(f"the clients of {path} have no models of their own: all of them use the global model")
    if not 0 <= client < run.config.clients:
        raise ConfigError(f"{path} has no client {client}, its clients are 0 to {run.config.clients - 1}")
    state = run.last_state(note)
    with run.federation(_Engine) as running, ServerScope(running, state, state.round, "evaluation") as scope:
        (task,) = evaluation_tasks(scope, [(client, {})])
        assert isinstance(running.engine, _Engine)
        network = running.engine.own_model(task)
    return Placement.plain().model(network).eval(), bool(task.meta["took_part"])
