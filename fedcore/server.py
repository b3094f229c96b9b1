"""One round on the server: choose, send, train, check, fold, aggregate, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedcore.client import unpack_update
from fedcore.engines.base import ClientFailure, ClientResult, ClientTask, Outcome
from fedcore.errors import PluginContractError, RejectUpdate, RoundFailedError
from fedcore.ledger import Ledger
from fedcore.plugins import Plugin, match
from fedcore.server_context import (
    Federation,
    Notify,
    Round,
    ServerContext,
    check_cohort,
    check_partial,
    in_order,
)
from fedcore.state import ServerState
from fedcore.tensors import Fold, bytes_of, first_nonfinite
from fedcore.types import ClientUpdate, Tensors

__all__ = ["Federation", "RoundResult", "ServerContext", "run_post_train", "run_round"]


@dataclass(frozen=True)
class RoundResult:
    """A finished round: the state to commit, its record, and what was measured of it."""

    state: ServerState
    accepted: list[int]
    record: dict[str, Any]
    seconds: dict[str, Any]


def run_round(federation: Federation, committed: ServerState, notify: Notify | None = None) -> RoundResult:
    """Run one round from the committed state; nothing outside the result changes.

    :raises RoundFailedError: fewer than ``min_clients`` updates were accepted, or the new model is not finite.
    """
    current = Round.open(federation, committed)
    try:
        return _run_round(federation, current, notify or (lambda event, details: None))
    finally:
        current.close()


def _run_round(federation: Federation, current: Round, notify: Notify) -> RoundResult:
    config, plugins = federation.config, federation.problem.plugins
    began = time.perf_counter()
    for plugin, cohort in plugins.each("select_clients", server=current.context()):
        if cohort is not None:
            current.cohort += check_cohort(cohort, config.clients, plugin.name)
            break
    current.phase = "begin_round"
    for _ in plugins.each("begin_round", server=current.context()):
        pass
    current.phase = "round"
    current.share(f"round-{current.number}", current.broadcast())

    collector = Collector(federation, current)
    for task, outcome in train_cohort(federation, current):
        collector.take(task, outcome)
        notify("client", {"client": task.client, "failed": isinstance(outcome, ClientFailure)})
    trained = time.perf_counter()
    if len(current.accepted) < config.min_clients:
        raise RoundFailedError(_too_few(current, config.min_clients))
    model = aggregate(federation, current, collector)
    ended = time.perf_counter()

    manifest = {
        **current.committed.manifest,
        **{client: collector.versions[client] for client in current.accepted},
    }
    state = replace(
        current.committed,
        model=model,
        round=current.number + 1,
        plugins=current.states.snapshot(),
        manifest=manifest,
        ledger=Ledger(current.committed.ledger).add(current.ledger).as_json(),
    )
    record = {
        "round": current.number,
        "lr": current.lr,
        "cohort": current.cohort,
        "accepted": len(current.accepted),
        "failures": current.failures,
        "losses": collector.mean_losses(),
        "bytes": current.ledger.as_json(),
    }
    seconds = {
        "round": ended - began,
        "local_training": trained - began - collector.seconds,
        "plugin_terms": collector.plugin_seconds,
        "client_seconds": collector.client_seconds,
        "aggregation": ended - trained + collector.seconds,
    }
    return RoundResult(state, current.accepted, record, seconds)


def train_cohort(federation: Federation, current: Round) -> Iterator[tuple[ClientTask, Outcome]]:
    """Train the cohort with its pauses; yields each client's last outcome in dispatch order.

    Longest work first, ties by id: a pure function of the cohort, and the workers end together.
    """
    sizes = [len(indices) for indices in federation.partition.train]
    tasks = [
        ClientTask(
            id=f"round-{current.number}-fit-{client}",
            kind="fit_begin",
            client=client,
            round=current.number,
            session=f"round-{current.number}-{client}",
            state_round=current.committed.manifest.get(client),
            shared=current.shared_keys[-1],
        )
        for client in sorted(current.cohort, key=lambda client: (-sizes[client], client))
    ]
    for _ in tasks:
        current.count_down()
    for epoch, names in federation.problem.breaks.items():
        snapshots: dict[int, Tensors] = {}
        for task, outcome in in_order(tasks, federation.engine.run(tasks, window=None)):
            if isinstance(outcome, ClientFailure):
                yield task, outcome
            else:
                snapshots[task.client] = outcome.tensors
        patches = _exchange(federation, current, epoch, names, snapshots)
        tasks = [
            replace(
                task,
                id=f"round-{current.number}-resume-{epoch}-{task.client}",
                kind="fit_resume",
                tensors=patches.get(task.client, {}),
                meta={"epoch": epoch},
            )
            for task in tasks
            if task.client in snapshots
        ]
    yield from in_order(tasks, federation.engine.run(tasks, window=federation.config.max_waiting))


def _exchange(
    federation: Federation, current: Round, epoch: int, names: list[str], snapshots: Mapping[int, Tensors]
) -> dict[int, Tensors]:
    problem = federation.problem
    patches: dict[int, Tensors] = {client: {} for client in snapshots}
    for plugin in [plugin for plugin in problem.plugins if plugin.name in names]:
        own = match(plugin.exchanges, problem.layout.shapes, plugin, "exchanges")
        seen = {client: {name: tensors[name] for name in own} for client, tensors in snapshots.items()}
        result = problem.plugins.call(
            plugin.name, "mid_local_epoch", server=current.context(), epoch=epoch, snapshots=seen
        )
        for tensors in seen.values():
            current.ledger.up(plugin.name, bytes_of(tensors))
        for client, tensors in (result or {}).items():
            if client not in snapshots:
                raise PluginContractError(
                    f"plugin {plugin.name!r} hook mid_local_epoch (round {current.number}): patches client {client}, "
                    "which is not paused",
                    plugin=plugin.name,
                    hook="mid_local_epoch",
                )
            check_partial(problem, tensors, own, plugin.name, "mid_local_epoch")
            current.ledger.down(plugin.name, bytes_of(tensors))
            patches[client].update(tensors)
    return patches


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


def aggregate(federation: Federation, current: Round, collector: Collector) -> Tensors:
    """Return w_{t+1}: owned parts by their owners, the mean for the rest, then every ``server_step``."""
    problem, plugins = federation.problem, federation.problem.plugins
    try:
        mean = collector.fold.mean()
    except ZeroDivisionError as error:
        raise RoundFailedError(f"round {current.number}: {error}") from None
    model = {name: mean.get(name, tensor) for name, tensor in current.model.items()}
    for plugin in plugins.implementers("aggregate"):
        owned = match(plugin.owns, problem.layout.shapes, plugin, "owns")
        part = plugins.call(plugin.name, "aggregate", server=current.context(), updates=collector.kept[plugin.name])
        model.update(_checked(federation, plugin, "aggregate", part, owned))
    trainable = [name for name in problem.layout.shared if name in problem.layout.trainable]
    for plugin in plugins.implementers("server_step"):
        mean = {name: model[name] for name in trainable}
        part = plugins.call(plugin.name, "server_step", server=current.context(), mean=mean)
        model.update(_checked(federation, plugin, "server_step", part, trainable))
    broken = first_nonfinite(model)
    if broken:
        raise RoundFailedError(
            f"round {current.number}: the aggregated {broken!r} is not finite; the last good state is kept"
        )
    return model


def _checked(
    federation: Federation, plugin: Plugin, hook: str, part: Mapping[str, Tensor] | None, allowed: list[str]
) -> Tensors:
    tensors = {name: tensor.detach().cpu() for name, tensor in (part or {}).items()}
    check_partial(federation.problem, tensors, allowed, plugin.name, hook)
    return tensors


def run_post_train(federation: Federation, committed: ServerState) -> tuple[ServerState, list[dict[str, Any]]]:
    """Run every ``post_train``; returns the state to commit and the failures of clients that were asked."""
    current = Round.open(federation, committed)
    current.phase = "post_train"
    try:
        for _ in federation.problem.plugins.each("post_train", server=current.context()):
            pass
    finally:
        current.close()
    state = replace(
        committed,
        model=current.model,
        plugins=current.states.snapshot(),
        ledger=Ledger(committed.ledger).add(current.ledger).as_json(),
    )
    return state, current.failures


def _too_few(current: Round, needed: int) -> str:
    reasons = "; ".join(f"client {f['client']}: {f['kind']}, {f['message']}" for f in current.failures[:5])
    more = f"; and {len(current.failures) - 5} more" if len(current.failures) > 5 else ""
    return (
        f"round {current.number}: {len(current.accepted)} of {len(current.cohort)} clients gave a usable update, "
        f"--min-clients asks for {needed}. {reasons}{more}. The last good state is kept."
    )
