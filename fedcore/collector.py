"""Updates as they arrive, in dispatch order: checked, shown to plugins, folded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from fedcore.engines.base import ClientFailure, ClientResult, ClientTask, Outcome
from fedcore.errors import PluginContractError, RejectUpdate
from fedcore.runtime import unpack_update
from fedcore.server_context import Federation, Round
from fedcore.tensors import Fold, bytes_of, first_nonfinite
from fedcore.types import ClientUpdate


class Collector:
    """Takes outcomes in dispatch order: checks each update, lets plugins see it, folds it."""

    def __init__(self, federation: Federation, current: Round) -> None:
        self._federation, self._current = federation, current
        problem = federation.problem
        self._owners = {
            plugin.name: problem.claimed(plugin, "owns") for plugin in problem.plugins.implementers("aggregate")
        }
        self._names = {plugin.name for plugin in problem.plugins.plugins}
        self.fold = Fold(problem.layout, problem.layout.shared)
        self.kept: dict[str, list[ClientUpdate]] = {plugin: [] for plugin in self._owners}
        self.versions: dict[int, int | None] = {}
        self.seconds = 0.0
        self.client_seconds = 0.0
        self.plugin_seconds: dict[str, float] = {}
        self._losses: list[tuple[int, Mapping[str, float]]] = []

    def take(self, task: ClientTask, outcome: Outcome) -> None:
        """Accept one outcome, or record why not; a rejected update leaves no trace."""
        began = time.perf_counter()
        if isinstance(outcome, ClientFailure):
            self._current.fail(task.client, outcome.kind, outcome.message)
        else:
            try:
                self._accept(task, outcome)
            except RejectUpdate as error:
                self._current.fail(task.client, "rejected", str(error))
        self.seconds += time.perf_counter() - began

    def _accept(self, task: ClientTask, result: ClientResult) -> None:
        current, plugins = self._current, self._federation.problem.plugins
        update = unpack_update(task.client, result)
        sizes = {"model": bytes_of(update.model)}
        sizes.update({plugin: bytes_of(tensors) for plugin, tensors in update.payload.items()})
        update = self._inspected(task, update)
        weight = float(plugins.first("weight", server=current.context(), update=update))
        self.fold.add(update.model, weight=weight, samples=update.samples)
        for plugin in plugins.implementers("accumulate"):
            try:
                plugins.call(plugin.name, "accumulate", server=current.context(), update=update)
            except RejectUpdate as error:
                raise PluginContractError(
                    f"plugin {plugin.name!r} hook accumulate (round {current.number}, client {task.client}): rejects "
                    f"an update that is accepted already ({error}). Raise RejectUpdate in pre_aggregate.",
                    plugin=plugin.name,
                    hook="accumulate",
                ) from error
        for plugin_name, names in self._owners.items():
            own = {name: update.model[name] for name in names}
            self.kept[plugin_name].append(replace(update.scoped(plugin_name), model=own))
        current.accepted.append(task.client)
        for sender, size in sizes.items():
            current.ledger.up(sender, size)
        self.versions[task.client] = result.meta["version"]
        self._losses.append((update.samples, update.metrics.get("losses", {})))
        self.client_seconds += result.meta["seconds"]
        for name, seconds in result.meta["plugin_seconds"].items():
            self.plugin_seconds[name] = self.plugin_seconds.get(name, 0.0) + seconds

    def _inspected(self, task: ClientTask, update: ClientUpdate) -> ClientUpdate:
        """Return the update as every ``pre_aggregate`` leaves it; what they wrote about a rejected one is undone."""
        current, plugins = self._current, self._federation.problem.plugins
        self._check(task, update)
        inspectors = [plugin.name for plugin in plugins.implementers("pre_aggregate")]
        saved = current.states.savepoint(inspectors)
        try:
            for name in inspectors:
                seen = plugins.call(name, "pre_aggregate", server=current.context(), update=update)
                if seen is not None:
                    update = update.merged(name, seen)
                    self._check(task, update)
        except RejectUpdate:
            current.states.restore(saved)
            raise
        return update

    def _check(self, task: ClientTask, update: ClientUpdate) -> None:
        layout = self._federation.problem.layout
        what = f"client {task.client}"
        if update.client != task.client:
            raise RejectUpdate(f"{what}: the update says that it is client {update.client}'s")
        for name, number in (("samples", update.samples), ("steps", update.steps)):
            if not isinstance(number, int) or number < 1:
                raise RejectUpdate(f"{what}: {name} is {number!r}, expected a whole number of at least 1")
        layout.check(update.model, layout.shared, what)
        strangers = sorted(set(update.payload) - self._names)
        if strangers:
            raise RejectUpdate(f"{what}: sent tensors for {strangers[0]!r}, which is no plugin of this run")
        for plugin, tensors in update.payload.items():
            broken = first_nonfinite(tensors)
            if broken:
                raise RejectUpdate(f"{what}: {broken!r} of plugin {plugin!r} has values that are not finite")

    def mean_losses(self) -> dict[str, float]:
        """Return the clients' mean losses by name, weighted by samples."""
        names = sorted({name for _, losses in self._losses for name in losses})
        return {
            name: sum(n * losses[name] for n, losses in self._losses if name in losses)
            / sum(n for n, losses in self._losses if name in losses)
            for name in names
        }
