"""Training of a cohort: broadcasts, a task per client, and pauses in which plugins exchange layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from fedcore.base.errors import PluginContractError, RejectUpdate
from fedcore.base.plugin_state import States
from fedcore.base.tensors import bytes_of, flatten
from fedcore.base.types import Steps, Tensors
from fedcore.client.messages import ClientFailure, ClientTask, Outcome
from fedcore.server.context import ScopeContext
from fedcore.server.scope import Round, ServerScope
from fedcore.server.validation import check_partial


class Broadcasts:
    """The broadcasts of one round or evaluation. ``__init__`` shares them under a key.

    ``broadcast_to`` is called when an engine sends a client's task, so that only the messages of tasks in flight take
    memory. Updates arrive in the meantime. The hook sees the server as of ``__init__``, whenever it is called.
    """

    def __init__(self, scope: ServerScope, key: str) -> None:
        self.key = key
        plugins = scope.federation.setup.plugins
        self._scope, self._plugins, self._snapshot = scope, plugins, scope.as_of_now()
        self._sends_singly = bool(plugins.implementers("broadcast_to"))
        broadcasts = plugins.each("broadcast", server=self._server("broadcast"))
        self._to_all = {plugin.name: dict(tensors) for plugin, tensors in broadcasts if tensors}
        self._shared = scope.share(key, self._to_all)
        self._sizes: dict[int, dict[str, int]] = {}

    def to(self, client: int) -> Callable[[], Tensors] | None:
        """Return a function that makes the tensors of a client's task, named ``plugin/name``.

        :returns: None if no plugin has ``broadcast_to``.
        """
        return partial(self._message, client) if self._sends_singly else None

    def count(self, clients: Collection[int]) -> None:
        """Count the bytes sent to these clients. Their own messages that no engine has sent are computed first."""
        self._scope.ledger.update({(sender, "down"): size * len(clients) for sender, size in self._shared.items()})
        for client in clients if self._sends_singly else ():
            if client not in self._sizes:
                self._message(client)
            self._scope.ledger.update({(sender, "down"): size for sender, size in self._sizes[client].items()})

    def _server(self, hook: str) -> ScopeContext:
        scope = copy.copy(self._snapshot)
        # New states for each call: an edit in place must not reach the next call.
        scope.states = States(scope.committed.plugins, read_only=hook)
        return ScopeContext(scope)

    def _message(self, client: int) -> Tensors:
        broadcasts = self._plugins.each("broadcast_to", server=self._server("broadcast_to"), client=client)
        by_plugin = {plugin.name: tensors or {} for plugin, tensors in broadcasts}
        for plugin, tensors in by_plugin.items():
            if twice := sorted(set(tensors).intersection(self._to_all.get(plugin, {}))):
                clash = f"sends {twice[0]!r}, which broadcast sends to all clients"
                raise PluginContractError.of(plugin, clash, hook="broadcast_to", client=client)
        self._sizes[client] = {name: bytes_of(tensors) for name, tensors in by_plugin.items()}
        return flatten(by_plugin)[0]


def train_cohort(current: Round, broadcasts: Broadcasts | None) -> Iterator[tuple[ClientTask, Outcome]]:
    """Train the cohort with its pauses; yield each client's last outcome.

    Clients with the most samples are dispatched first, and ties go by id. This order is a pure function of the cohort,
    and it lets the workers end at about the same time.

    :param broadcasts: None if no client can be reached.
    """
    federation, setup = current.federation, current.federation.setup
    tasks = _first_tasks(current, broadcasts)
    reached = [task.client for task in tasks if current.simulated[task.client].reached]
    for epoch, names in setup.breaks.items():
        tasks, failed = _without_lost(current, tasks, before=epoch)
        yield from failed
        exchanged = [layer for name in names for layer in setup.claimed(setup.plugins[name], "exchanges")]
        snapshots: dict[int, Tensors] = {}
        for task, outcome in current.outcomes(tasks):
            if isinstance(outcome, ClientFailure):
                yield task, outcome
                continue
            try:
                snapshots[task.client] = federation.validator.snapshot(task, outcome, exchanged, epoch)
            except RejectUpdate as error:
                yield task, ClientFailure(error.kind, str(error))
        patches = _exchange(current, epoch, names, snapshots) if snapshots else {}
        tasks = [
            replace(
                task,
                id=f"round-{current.number}-resume-{epoch}-{task.client}",
                kind="fit_resume",
                compute=None,
                tensors=patches.get(task.client, {}),
                meta={**task.meta, "epoch": epoch},
            )
            for task in tasks
            if task.client in snapshots
        ]
    tasks, failed = _without_lost(current, tasks, before=None)
    yield from failed
    yield from current.outcomes(tasks, window=federation.config.max_waiting)
    if broadcasts is not None:
        broadcasts.count(reached)


def _first_tasks(current: Round, broadcasts: Broadcasts | None) -> list[ClientTask]:
    """Return the tasks that begin the clients' training, in dispatch order."""
    simulated = current.simulated
    unit, _ = current.federation.config.local_work

    def work(client: int) -> dict[str, int]:
        completed = simulated[client].completed
        return {"steps" if isinstance(completed, Steps) else unit: int(completed)}

    return [
        ClientTask(
            id=f"round-{current.number}-fit-{client}",
            kind="fit_begin",
            client=client,
            round=current.number,
            session=f"{client}" if current.federation.setup.breaks else None,
            version=current.committed.manifest.get(client),
            shared=None if broadcasts is None else broadcasts.key,
            compute=None if broadcasts is None else broadcasts.to(client),
            meta={} if simulated[client].failure else work(client),
        )
        for client in current.dispatch_order()
    ]


def _without_lost(
    current: Round, tasks: list[ClientTask], *, before: int | None
) -> tuple[list[ClientTask], list[tuple[ClientTask, Outcome]]]:
    """Separate the tasks of clients that the simulated system loses before an epoch.

    Their work would not be used, so it is not done.

    :param before: the epoch; None for the end of the training.
    :returns: the tasks that stay, and the lost ones with their failures.
    """
    staying: list[ClientTask] = []
    failed: list[tuple[ClientTask, Outcome]] = []
    for task in tasks:
        simulated = current.simulated[task.client]
        if simulated.failure is not None and (before is None or simulated.completed < before):
            failed.append((task, ClientFailure(*simulated.failure)))
        else:
            staying.append(task)
    return staying, failed


def _exchange(current: Round, epoch: int, names: list[str], snapshots: Mapping[int, Tensors]) -> dict[int, Tensors]:
    """Let plugins exchange; return by client the tensors to load into its model before it goes on."""
    setup = current.federation.setup
    patches: dict[int, Tensors] = {client: {} for client in snapshots}
    for plugin in (setup.plugins[name] for name in names):
        layers = setup.claimed(plugin, "exchanges")
        excerpts = {client: {name: tensors[name] for name in layers} for client, tensors in snapshots.items()}
        returned = setup.plugins.call(
            plugin.name, "mid_local_epoch", server=ScopeContext(current), epoch=epoch, snapshots=excerpts
        )
        for tensors in excerpts.values():
            current.ledger[plugin.name, "up"] += bytes_of(tensors)
        for client, tensors in (returned or {}).items():
            if client not in snapshots:
                fault = f"patches client {client}, which is not paused"
                raise PluginContractError.of(plugin.name, fault, hook="mid_local_epoch", round=current.number)
            check_partial(setup, tensors, layers, plugin.name, "mid_local_epoch")
            current.ledger[plugin.name, "down"] += bytes_of(tensors)
            patches[client].update(tensors)
    return patches
