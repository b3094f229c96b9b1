"""Updates as they arrive, in dispatch order: checked, shown to plugins, folded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from fedcore.engines.base import ClientFailure, ClientResult, ClientTask, Outcome
from fedcore.errors import RejectUpdate
from fedcore.plugins import match
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
            plugin.name: match(plugin.owns, problem.layout.shapes, plugin, "owns")
            for plugin in problem.plugins.implementers("aggregate")
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
        self._check(task, update)
        for plugin in plugins.implementers("pre_aggregate"):
            seen = plugins.call(
                plugin.name, "pre_aggregate", server=current.context(), update=update.scoped(plugin.name)
            )
            if seen is not None:
                update = update.merged(plugin.name, seen)
                self._check(task, update)
        weight = float(plugins.first("weight", server=current.context(), update=_Scoped(update)))
        self.fold.add(update.model, weight=weight, samples=update.samples)
        for _ in plugins.each("accumulate", server=current.context(), update=_Scoped(update)):
            pass
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


class _Scoped:
    """An update that reaches each plugin as that plugin's view."""

    def __init__(self, update: ClientUpdate) -> None:
        self.scoped = update.scoped
        self.client = update.client
