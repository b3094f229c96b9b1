"""Collection: each arriving update is validated, passed to plugins and added up, in dispatch order."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from fedcore.base.errors import PluginCallError, RejectUpdate, print_traceback
from fedcore.base.tensors import bytes_of, clone
from fedcore.base.types import ClientUpdate
from fedcore.client.messages import ClientFailure, ClientTask, Outcome
from fedcore.hooks.plugins import REJECTING
from fedcore.server.aggregation import RunningMean
from fedcore.server.context import ScopeContext
from fedcore.server.scope import Round


class Collector:
    """Takes outcomes in dispatch order."""

    def __init__(self, current: Round) -> None:
        self._current, self._federation = current, current.federation
        self.server = ScopeContext(current)
        """The round as hooks see it."""
        self._lr = self.server.lr
        setup = current.federation.setup
        self._owners = {
            plugin.name: setup.claimed(plugin, "owns")
            for plugin in setup.plugins.implementers("aggregate")
            if plugin.owns
        }
        self._rejecting = {plugin.name for hook in REJECTING for plugin in setup.plugins.implementers(hook)}
        self.running_mean = RunningMean(setup.uploads, setup.uploads.shared)
        """The mean of the accepted models."""
        self.for_owners: dict[str, list[ClientUpdate]] = {plugin: [] for plugin in self._owners}
        """By plugin that owns parameters, the updates that it aggregates itself."""
        self.versions: dict[int, int | None] = {}
        """The version of each accepted client's state; None if the client keeps nothing."""
        self.seconds = 0.0
        """The seconds spent in the collector."""
        self.client_seconds = 0.0
        """The seconds spent on clients."""
        self.plugin_seconds = defaultdict[str, float](float)
        """The seconds spent on clients in hooks, by plugin."""
        self._losses: list[tuple[int, Mapping[str, float]]] = []

    def take(self, task: ClientTask, outcome: Outcome) -> bool:
        """Accept one outcome, or record why it is rejected; return whether it was accepted.

        A rejected update changes nothing. An update for which a plugin raises is rejected, too. If plugins raise for
        all updates of a round, :func:`require_enough` ends it.
        """
        began, accepted = time.perf_counter(), False
        if isinstance(outcome, ClientFailure):
            self._current.fail(task.client, outcome.kind, outcome.message)
        else:
            self._current.arrived += 1
            try:
                self._accept(task, outcome)
                accepted = True
            except (RejectUpdate, PluginCallError) as error:
                if isinstance(error, PluginCallError):
                    print_traceback()
                    self._current.raised.append(error)
                kind = error.kind if isinstance(error, RejectUpdate) else "rejected"
                self._current.fail(task.client, kind, str(error))
        self.seconds += time.perf_counter() - began
        return accepted

    def _accept(self, task: ClientTask, outcome: Outcome) -> None:
        current, setup = self._current, self._federation.setup
        plugins, uploads = setup.plugins, setup.uploads
        sent, largest = self._federation.validator.update(task, outcome, self._lr)
        # Sizes of what the client sent: hooks change the update, and its payload is cleared below.
        sizes = [("model", bytes_of(sent.model))]
        sizes += [(plugins.namespaces[name], bytes_of(tensors)) for name, tensors in sent.payload.items()]
        update, weight, changed = sent, float(sent.samples), False  # as FedAvg weighs it
        if setup.reads_updates:
            named = uploads.named(sent.model)
            with current.states.undone_on_error(self._rejecting):
                update = self._inspected(task, replace(sent, model={**named}))
                weight = self._weight(update)
                for plugin in plugins.implementers("accumulate"):
                    plugins.call(plugin.name, "accumulate", server=self.server, update=update)
            changed = [*named] != [*update.model] or any(update.model[name] is not named[name] for name in named)
        for namespace, tensors in update.payload.items():
            if plugins.namespaces[namespace] not in self._owners:
                tensors.clear()
        self.running_mean.add(
            uploads.join(update.model) if changed else sent.model, weight=weight, samples=update.samples
        )
        for plugin_name, names in self._owners.items():
            self.for_owners[plugin_name].append(_owned_part(update.scoped(plugins.aggregates_in(plugin_name)), names))
        current.frozen = current.frozen & update.frozen if current.accepted else update.frozen
        current.accepted.append(task.client)
        current.largest[task.client] = largest
        current.weights[task.client] = weight
        for sender, size in sizes:
            current.ledger[sender, "up"] += size
        self.versions[task.client] = sent.version
        self._losses.append((update.samples, update.metrics.get("losses", {})))
        self.client_seconds += sent.seconds
        for name, seconds in sent.plugin_seconds.items():
            self.plugin_seconds[name] += seconds

    def _inspected(self, task: ClientTask, update: ClientUpdate) -> ClientUpdate:
        """Return the update after every ``pre_aggregate``."""
        plugins, validator = self._federation.setup.plugins, self._federation.validator
        implementers = plugins.implementers("pre_aggregate")
        for plugin in (plugin for plugin in implementers if plugin.encodes):
            update = plugins.call(plugin.name, "pre_aggregate", server=self.server, update=update) or update
        if validator.encoded:
            # Whole models from here on.
            self._check_changed(task, update, *(plugin.name for plugin in implementers if plugin.encodes))
        for plugin in (plugin for plugin in implementers if not plugin.encodes):
            replaced = plugins.call(plugin.name, "pre_aggregate", server=self.server, update=update)
            if replaced is not None:
                update = replaced
                self._check_changed(task, update, plugin.name)
        return update

    def _check_changed(self, task: ClientTask, update: ClientUpdate, *plugins: str) -> None:
        """Validate an update that ``pre_aggregate`` of these plugins changed.

        :raises RejectUpdate: with the names of the plugins.
        """
        try:
            self._federation.validator.check(task, update)
        except RejectUpdate as error:
            names = ", ".join(map(repr, plugins))
            raise RejectUpdate(f"{error}, after pre_aggregate of plugin {names} changed the update") from error

    def _weight(self, update: ClientUpdate) -> float:
        """Return an update's weight in the mean.

        :raises RejectUpdate: the weight is negative or not finite; with the name of the plugin.
        """
        plugin, returned = self._federation.setup.plugins.first("weight", server=self.server, update=update)
        weight = float(returned)
        if not (math.isfinite(weight) and weight >= 0):
            raise RejectUpdate(
                f"client {update.client}: plugin {plugin.name!r} hook weight returned {weight}, expected a finite "
                "number >= 0"
            )
        return weight

    def mean_losses(self) -> dict[str, float]:
        """Return the clients' mean losses by name, weighted by samples."""
        names = sorted({name for _, losses in self._losses for name in losses})
        return {
            name: sum(samples * losses[name] for samples, losses in self._losses if name in losses)
            / sum(samples for samples, losses in self._losses if name in losses)
            for name in names
        }


def _owned_part(update: ClientUpdate, names: Iterable[str]) -> ClientUpdate:
    """Return a copy of the part of an update that its owner aggregates, so that the rest of the update is freed."""
    payload = {name: value.clone() if isinstance(value, Tensor) else value for name, value in update.payload.items()}
    return replace(update, model=clone({name: update.model[name] for name in names}), payload=payload)
