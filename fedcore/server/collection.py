"""Collection: each arriving update is validated, passed to plugins and added up, in dispatch order."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from torch import Tensor

from fedcore.base.errors import PluginCallError, RejectUpdate, print_traceback
from fedcore.base.tensors import bytes_of, clone
from fedcore.base.types import ClientUpdate, Tensors, Updates
from fedcore.client.messages import ClientFailure, ClientTask, Outcome, Pair
from fedcore.hooks.plugins import REJECTING
from fedcore.server.aggregation import RunningMean
from fedcore.server.context import ScopeContext
from fedcore.server.scope import Round

_Valid = tuple[ClientUpdate, float, list[tuple[str, int]]]
"""An update that the validator accepts, the largest magnitude in it, and the bytes that each sender sent."""


class Collector:
    """Takes outcomes in dispatch order."""

    def __init__(self, current: Round) -> None:
        self._current, self._federation, self._lr = current, current.federation, current.lr
        self.server = ScopeContext(current)
        """The round as hooks see it."""
        setup = current.federation.setup
        self._owners = {p.name: setup.claimed(p, "owns") for p in setup.plugins.implementers("aggregate") if p.owns}
        # FedAvg's weights, whole models, and plugins that add up several updates in a call.
        single = [*map(setup.plugins.implementers, ("pre_aggregate", "weight"))]
        self._adds_together = setup.plugins.all_take("accumulate", "updates", but="update") and not any(single)
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
        self._losses = defaultdict[str, float](float)
        self._samples = defaultdict[str, int](int)

    def take(self, arrived: Sequence[Pair]) -> list[bool]:
        """Accept the outcomes that arrived together, or record why they are rejected; return which were accepted.

        A rejected update changes nothing. An update for which a plugin raises is rejected, too. If plugins raise for
        all updates of a round, :func:`require_enough` ends it.
        """
        began = time.perf_counter()
        added = self._added_together(arrived) if self._adds_together and len(arrived) > 1 else {}
        accepted = [self._take(task, outcome, added.get(task.client)) for task, outcome in arrived]
        self.seconds += time.perf_counter() - began
        return accepted

    def _added_together(self, arrived: Sequence[Pair]) -> dict[int, _Valid]:
        """Call ``accumulate`` once for all; return the updates by client. Empty: they have to be taken one by one."""
        with suppress(RejectUpdate, PluginCallError), self._current.states.undone_on_error(self._rejecting):
            valid = {task.client: self._valid(task, outcome) for task, outcome in arrived}
            for client, (sent, most, sizes) in valid.items():
                payload = {name: {**own} for name, own in sent.payload.items()}  # hooks pop from it, and may be undone
                valid[client] = replace(sent, payload=payload), most, sizes
            updates = Updates(replace(update, model=cast("Tensors", None)) for update, *_ in valid.values())
            self._federation.setup.plugins.call_all("accumulate", server=self.server, updates=updates)
            return valid
        return {}

    def _take(self, task: ClientTask, outcome: Outcome, added: _Valid | None) -> bool:
        """Accept one outcome, or record why it is rejected; return whether it was accepted."""
        if isinstance(outcome, ClientFailure):
            self._current.fail(task.client, outcome.kind, outcome.message)
        else:
            self._current.arrived += 1
            try:
                self._accept(task, outcome, added)
                return True
            except (RejectUpdate, PluginCallError) as error:
                if isinstance(error, PluginCallError):
                    print_traceback()
                    self._current.raised.append(error)
                self._current.fail(task.client, getattr(error, "kind", "rejected"), str(error))
        return False

    def _valid(self, task: ClientTask, outcome: Outcome) -> _Valid:
        """Validate an outcome. Sizes are those of what the client sent, before hooks change it."""
        sent, largest = self._federation.validator.update(task, outcome, self._lr)
        sizes = [(self._federation.setup.plugins.namespaces[name], bytes_of(own)) for name, own in sent.payload.items()]
        return sent, largest, [("model", bytes_of(sent.model)), *sizes]

    def _accept(self, task: ClientTask, outcome: Outcome, added: _Valid | None) -> None:
        current, setup = self._current, self._federation.setup
        plugins, uploads = setup.plugins, setup.uploads
        sent, largest, sizes = added or self._valid(task, outcome)
        update, weight, changed = sent, float(sent.samples), False  # as FedAvg weighs it
        if setup.reads_updates and added is None:
            named = uploads.named(sent.model)
            with current.states.undone_on_error(self._rejecting):
                update = self._inspected(task, replace(sent, model={**named}))
                weight = self._weight(update)
                plugins.call_all("accumulate", server=self.server, update=update, updates=Updates([update]))
            changed = [*named] != [*update.model] or any(update.model[name] is not named[name] for name in named)
        for namespace, tensors in update.payload.items():
            if plugins.namespaces[namespace] not in self._owners:
                tensors.clear()
        self.running_mean.add(uploads.join(update.model) if changed else sent.model, weight, samples=update.samples)
        for plugin_name, names in self._owners.items():
            named, part = uploads.named(update.model), update.scoped(plugins.aggregates_in(plugin_name))
            # A copy, so that the rest of the update is freed.
            payload = {name: v.clone() if isinstance(v, Tensor) else v for name, v in part.payload.items()}
            owned = clone({name: named[name] for name in names})
            self.for_owners[plugin_name].append(replace(part, model=owned, payload=payload))
        current.frozen = current.frozen & update.frozen if current.accepted else update.frozen
        current.accepted.append(task.client)
        current.largest[task.client], current.weights[task.client] = largest, weight
        for sender, size in sizes:
            current.ledger[sender, "up"] += size
        self.versions[task.client] = sent.version
        for name, loss in update.metrics.get("losses", {}).items():
            self._losses[name] += update.samples * loss
            self._samples[name] += update.samples
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
            if (replaced := plugins.call(plugin.name, "pre_aggregate", server=self.server, update=update)) is not None:
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
            fault = f"returned {weight}, expected a finite number >= 0"
            raise RejectUpdate(f"client {update.client}: plugin {plugin.name!r} hook weight {fault}")
        return weight

    def mean_losses(self) -> dict[str, float]:
        """Return the clients' mean losses by name, weighted by samples."""
        return {name: total / self._samples[name] for name, total in sorted(self._losses.items())}
