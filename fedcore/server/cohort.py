"""One round on the server: choose, send, train, check, fold, aggregate, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedcore.base.errors import DivergedError, PluginContractError, RejectUpdate, RoundFailedError
from fedcore.base.tensors import bytes_of, first_nonfinite
from fedcore.base.types import Tensors
from fedcore.client.messages import ClientFailure, ClientTask, Outcome
from fedcore.hooks.plugins import Plugin
from fedcore.server.collection import Collector
from fedcore.server.context import RoundContext, broadcasts, check_cohort, check_partial
from fedcore.server.dispatch_order import in_order
from fedcore.server.federation import Federation
from fedcore.server.ledger import Ledger
from fedcore.server.round import Notify, Round
from fedcore.server.state import ServerState
from fedcore.storage.manifest import Manifest

__all__ = ["Federation", "RoundResult", "run_post_train", "run_round"]


@dataclass(frozen=True)
class RoundResult:
    """A finished round: the state to commit, its record, and what was measured of it."""

    state: ServerState
    accepted: list[int]
    record: dict[str, Any]
    seconds: dict[str, Any]


def run_round(federation: Federation, committed: ServerState, notify: Notify | None = None) -> RoundResult:
    """Run one round from the committed state; nothing outside the result changes.

    :raises RoundFailedError: fewer than ``min_clients`` updates were accepted.
    :raises DivergedError: the same because updates were not finite, or the new model is not finite.
    """
    current = Round.open(federation, committed)
    try:
        return _run_round(federation, current, notify or (lambda event, details: None))
    finally:
        current.close()


def _run_round(federation: Federation, current: Round, notify: Notify) -> RoundResult:
    config, plugins = federation.config, federation.setup.plugins
    began = time.perf_counter()
    select(federation, current)
    any_reachable = any(simulated.reached for simulated in current.simulated.values())
    if any_reachable:
        current.phase = "begin_round"
        plugins.call_all("begin_round", server=RoundContext(current))
        current.phase = "round"
    chosen = time.perf_counter()
    if any_reachable:
        current.share(f"round-{current.number}", broadcasts(current))
    sent = time.perf_counter()

    collector = Collector(federation, current)
    for task, outcome in train_cohort(federation, current):
        collector.take(task, outcome)
        notify("client", {"client": task.client, "failed": isinstance(outcome, ClientFailure)})
    trained = time.perf_counter()
    if len(current.accepted) < config.min_clients:
        raise _too_few(current, config.min_clients)
    lost = not current.accepted  # a round that nothing came of leaves the model and the state as they are
    model = current.committed.model if lost else aggregate(federation, current, collector)
    ended = time.perf_counter()

    committed = Manifest.of(current.committed.manifest)
    manifest = committed.updated({client: collector.versions[client] for client in current.accepted})
    state = replace(
        current.committed,
        model=model,
        round=current.number + 1,
        plugins=current.committed.plugins if lost else current.states.snapshot(),
        manifest=manifest,
        ledger=Ledger(current.committed.ledger).add(current.ledger).as_json(),
        virtual_time=current.committed.virtual_time + federation.simulator.round_seconds(current.simulated.values()),
    )
    record = {
        "round": current.number,
        "lr": current.lr,
        "cohort": current.cohort,
        "accepted": len(current.accepted),
        "failures": current.failures,
        "ignored": current.ignored,
        "losses": collector.mean_losses(),
        "bytes": current.ledger.as_json(),
    }
    if config.system is not None:
        record |= {"virtual_time": state.virtual_time, "system": who_took_part(federation, current)}
    training = trained - sent - collector.seconds
    seconds = {
        "round": ended - began,
        "selection": chosen - began,
        "broadcast": sent - chosen,
        "local_training": training,
        "collection": collector.seconds,
        "aggregation": ended - trained,
        "client_seconds": collector.client_seconds,
        "idle_workers": max(0.0, federation.engine.workers * training - collector.client_seconds),
        "plugin_terms": collector.plugin_seconds,
    }
    return RoundResult(state, current.accepted, record, seconds)


def select(federation: Federation, current: Round) -> None:
    """Choose the cohort; nobody, and nobody is asked, where no client is available."""
    if not current.available:
        return
    for plugin, cohort in federation.setup.plugins.each("select_clients", server=RoundContext(current)):
        if cohort is not None:
            current.cohort += check_cohort(cohort, federation.config.clients, plugin.name)
            break
    current.simulated = {client: federation.simulator.simulated(current.number, client) for client in current.cohort}


def who_took_part(federation: Federation, current: Round) -> dict[str, Any]:
    """Return who took part in a round of the simulated system, for its record."""
    _, everything = federation.config.local_work
    took_part = sorted(current.accepted)
    return {
        "available": len(current.available),
        "took_part": took_part,
        "partial": {
            str(k): current.simulated[k].completed for k in took_part if current.simulated[k].completed < everything
        },
        "seconds": federation.simulator.round_seconds(current.simulated.values()),
    }


def train_cohort(federation: Federation, current: Round) -> Iterator[tuple[ClientTask, Outcome]]:
    """Train the cohort with its pauses; yields each client's last outcome in dispatch order.

    Longest work first, ties by id: a pure function of the cohort, and the workers end together.
    """
    holds, simulated = federation.partition.train, current.simulated
    unit, everything = federation.config.local_work
    tasks = [
        ClientTask(
            id=f"round-{current.number}-fit-{client}",
            kind="fit_begin",
            client=client,
            round=current.number,
            session=f"round-{current.number}-{client}",
            state_round=current.committed.manifest.get(client),
            shared=next(reversed(current.shared_keys), None),
            meta={}
            if simulated[client].failure or simulated[client].completed == everything
            else {unit: simulated[client].completed},
        )
        for client in sorted(current.cohort, key=lambda client: (-len(holds[client]), client))
    ]
    for task in tasks:
        if simulated[task.client].reached:
            current.count_down()
    for epoch, names in federation.setup.breaks.items():
        setup = federation.setup
        exchanged = [
            name for plugin in setup.plugins if plugin.name in names for name in setup.claimed(plugin, "exchanges")
        ]
        tasks, lost = _part(federation, current, tasks, before=epoch)
        yield from lost
        snapshots: dict[int, Tensors] = {}
        dropped: list[ClientTask] = []
        for task, outcome in in_order(tasks, federation.engine.run(tasks), current.ignore):
            if isinstance(outcome, ClientFailure):
                yield task, outcome
                continue
            try:
                snapshots[task.client] = federation.validator.snapshot(task, outcome, exchanged, epoch)
            except RejectUpdate as error:
                dropped.append(replace(task, id=f"{task.id}-end", kind="end_session", shared=None))
                yield task, ClientFailure(task.id, error.kind, str(error))
        for _ in federation.engine.run(dropped):
            pass
        patches = _exchange(federation, current, epoch, names, snapshots) if snapshots else {}
        tasks = [
            replace(
                task,
                id=f"round-{current.number}-resume-{epoch}-{task.client}",
                kind="fit_resume",
                tensors=patches.get(task.client, {}),
                meta={**task.meta, "epoch": epoch},
            )
            for task in tasks
            if task.client in snapshots
        ]
    tasks, lost = _part(federation, current, tasks, before=None)
    yield from lost
    yield from in_order(tasks, federation.engine.run(tasks, window=federation.config.max_waiting), current.ignore)


def _part(
    federation: Federation, current: Round, tasks: list[ClientTask], *, before: int | None
) -> tuple[list[ClientTask], list[tuple[ClientTask, Outcome]]]:
    """Take out the tasks of clients that the simulated system loses before an epoch, and end their sessions.

    Nothing of their work would be used, so it is not done.

    :param before: None is the end of the training.
    """
    kept: list[ClientTask] = []
    lost: list[tuple[ClientTask, Outcome]] = []
    for task in tasks:
        simulated = current.simulated[task.client]
        if simulated.failure is not None and simulated.lost_before(before):
            lost.append((task, ClientFailure(task.id, *simulated.failure)))
        else:
            kept.append(task)
    parked = [task for task, _ in lost if task.kind == "fit_resume"]
    ends = [replace(task, id=f"{task.id}-end", kind="end_session", shared=None, tensors={}) for task in parked]
    for _ in federation.engine.run(ends):
        pass
    return kept, lost


def _exchange(
    federation: Federation, current: Round, epoch: int, names: list[str], snapshots: Mapping[int, Tensors]
) -> dict[int, Tensors]:
    setup = federation.setup
    patches: dict[int, Tensors] = {client: {} for client in snapshots}
    for plugin in [plugin for plugin in setup.plugins if plugin.name in names]:
        own = setup.claimed(plugin, "exchanges")
        seen = {client: {name: tensors[name] for name in own} for client, tensors in snapshots.items()}
        result = setup.plugins.call(
            plugin.name, "mid_local_epoch", server=RoundContext(current), epoch=epoch, snapshots=seen
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
            check_partial(setup, tensors, own, plugin.name, "mid_local_epoch")
            current.ledger.down(plugin.name, bytes_of(tensors))
            patches[client].update(tensors)
    return patches


def aggregate(federation: Federation, current: Round, collector: Collector) -> Tensors:
    """Return w_{t+1}: owned parts by their owners, the mean for the rest, then every ``server_step``."""
    setup, plugins = federation.setup, federation.setup.plugins
    try:
        mean = collector.running_mean.mean()
    except ZeroDivisionError as error:
        raise RoundFailedError(f"round {current.number}: {error}") from None
    model = {name: mean.get(name, tensor) for name, tensor in current.model.items()}
    for plugin in plugins.implementers("aggregate"):
        owned = setup.claimed(plugin, "owns")
        part = plugins.call(plugin.name, "aggregate", server=RoundContext(current), updates=collector.kept[plugin.name])
        model.update(_checked(federation, plugin, "aggregate", part, owned))
    trainable = [name for name in setup.layout.shared if name in setup.layout.trainable]
    for plugin in plugins.implementers("server_step"):
        mean = {name: model[name] for name in trainable}
        part = plugins.call(plugin.name, "server_step", server=RoundContext(current), mean=mean)
        model.update(_checked(federation, plugin, "server_step", part, trainable))
    broken = first_nonfinite(model)
    if broken:
        raise DivergedError(
            f"round {current.number}: the aggregated {broken!r} is not finite. {_steadier(current)} "
            "The last good state is kept."
        )
    return model


def _checked(
    federation: Federation, plugin: Plugin, hook: str, part: Mapping[str, Tensor] | None, allowed: list[str]
) -> Tensors:
    tensors = {name: tensor.detach().cpu() for name, tensor in (part or {}).items()}
    check_partial(federation.setup, tensors, allowed, plugin.name, hook)
    return tensors


def run_post_train(
    federation: Federation, committed: ServerState
) -> tuple[ServerState, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run every ``post_train``; returns the state to commit, the failures of who was asked, and what was ignored."""
    current = Round.open(federation, committed)
    current.phase = "post_train"
    try:
        federation.setup.plugins.call_all("post_train", server=RoundContext(current))
    finally:
        current.close()
    state = replace(
        committed,
        model=current.model,
        plugins=current.states.snapshot(),
        ledger=Ledger(committed.ledger).add(current.ledger).as_json(),
    )
    return state, current.failures, current.ignored


def _too_few(current: Round, needed: int) -> RoundFailedError:
    if not current.cohort:
        return RoundFailedError(
            f"round {current.number}: no client is available, --min-clients asks for {needed}. The last good state is "
            "kept; with --min-clients 0 such a round changes nothing and the run goes on."
        )
    reasons = "; ".join(f"client {f['client']}: {f['kind']}, {f['message']}" for f in current.failures[:5])
    more = f"; and {len(current.failures) - 5} more" if len(current.failures) > 5 else ""
    what = (
        f"round {current.number}: {len(current.accepted)} of {len(current.cohort)} clients gave a usable update, "
        f"--min-clients asks for {needed}. {reasons}{more}."
    )
    diverged = sum(failure["kind"] == "diverged" for failure in current.failures)
    if diverged and len(current.accepted) + diverged >= needed:  # the others alone would not have failed the round
        return DivergedError(f"{what} {_steadier(current)} The last good state is kept.")
    return RoundFailedError(f"{what} The last good state is kept.")


def _steadier(current: Round) -> str:
    """Say which options make local steps smaller, with their values in use."""
    config = current.federation.config
    clip = "off" if config.clip_norm is None else f"{config.clip_norm:g}"
    ways = [f"a smaller --lr ({config.lr:g} now)", f"a smaller bound on gradients, --clip-norm ({clip} now)"]
    if config.clip_norm is None:
        ways[1] = f"bounded gradients, such as --clip-norm 10 ({clip} now)"
    if config.momentum:
        ways.append(f"less --momentum ({config.momentum:g} now)")
    return f"Training diverged; try {', '.join(ways[:-1])} or {ways[-1]}."
