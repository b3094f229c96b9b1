"""One round on the server: select, send, train, check, aggregate, commit. After the last one, ``post_train``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from fedcore.base.errors import PluginContractError, RejectUpdate
from fedcore.base.types import ClientUpdate, Steps
from fedcore.client.messages import ClientTask, Outcome
from fedcore.hooks.checks import whole_numbers
from fedcore.server.aggregation import aggregate, require_enough
from fedcore.server.cohort import Broadcasts, train_cohort
from fedcore.server.collection import Collector
from fedcore.server.context import ScopeContext
from fedcore.server.scope import Federation, Round, ServerScope
from fedcore.server.state import ServerState
from fedcore.server.system import Everybody

Notify = Callable[[str, Mapping[str, Any]], None]
"""A callback that takes an event's name and its details."""


def run_round(
    federation: Federation, committed: ServerState, notify: Notify
) -> tuple[ServerState, dict[str, Any], dict[str, Any]]:
    """Run one round from the committed state. It changes nothing outside of the result.

    :returns: the state to commit; the round's line of metrics.jsonl, without its evaluation and reports; measured
        seconds by name, and by plugin under ``plugin_terms``.
    :raises RoundFailedError: fewer than ``min_clients`` updates were accepted.
    :raises DivergedError: updates are missing because they were not finite, or the new model is not finite.
    """
    with Round(federation, committed, committed.round) as current:
        began = time.perf_counter()
        _select(current)
        any_reachable = any(simulated.reached for simulated in current.simulated.values())
        if any_reachable:
            current.phase = "begin_round"
            federation.setup.plugins.call_all("begin_round", server=ScopeContext(current))
            current.phase = "round"
        selected = time.perf_counter()
        broadcasts = Broadcasts(current, f"round-{current.number}") if any_reachable else None
        sent = time.perf_counter()
        collector = Collector(current)
        outcomes = iter(_after_all_updates(current, collector, train_cohort(current, broadcasts)))
        while arrived := list(islice(outcomes, getattr(federation.engine, "together", 1))):
            for (task, _), accepted in zip(arrived, collector.take(arrived), strict=True):
                notify("client", {"client": task.client, "failed": not accepted})
        trained = time.perf_counter()
        require_enough(current)
        if current.accepted:
            aggregate(current, collector.server, collector.running_mean, collector.for_owners)
        ended = time.perf_counter()
    state = _next_state(current, collector)
    training = trained - sent - collector.seconds
    seconds = {
        "round": ended - began,
        "selection": selected - began,
        "broadcast": sent - selected,
        "local_training": training,
        "collection": collector.seconds,
        "aggregation": ended - trained,
        "client_seconds": collector.client_seconds,
        "idle_workers": max(0.0, federation.engine.workers * training - collector.client_seconds),
        "plugin_terms": collector.plugin_seconds,
    }
    return state, _record(current, collector, state), seconds


def _select(current: Round) -> None:
    """Select the cohort and simulate its outcomes. If no client is available, no hook is called.

    With ``--system concurrency`` the cohort consists of the clients whose updates arrive.
    """
    setup, arriving = current.federation.setup, current.federation.system.arriving(current.number)
    if arriving is not None:
        current.staleness = dict(arriving)
        current.select(dict.fromkeys(arriving))
        return
    if not current.available:
        return
    current.phase = "select_clients"
    plugin, cohort = setup.plugins.first("select_clients", server=ScopeContext(current))
    current.select(_checked_cohort(cohort, current.federation, plugin.name))
    current.phase = "round"


def _after_all_updates(
    current: Round, collector: Collector, outcomes: Iterable[tuple[ClientTask, Outcome]]
) -> Iterable[tuple[ClientTask, Outcome]]:
    """Return the outcomes after every ``all_updates``. Without such a hook no outcome is kept.

    :raises PluginContractError: a plugin returned an update of a client that sent no valid one.
    """
    plugins, validator = current.federation.setup.plugins, current.federation.validator
    if not plugins.implementers("all_updates"):
        return outcomes
    arrived = list(outcomes)
    valid: dict[int, ClientUpdate] = {}
    for task, outcome in arrived:
        with suppress(RejectUpdate):  # the collector validates again, and records it
            valid[task.client], _ = validator.update(task, outcome, current.lr)
    for plugin in plugins.implementers("all_updates") if valid else ():
        replaced = plugins.call(plugin.name, "all_updates", server=collector.server, updates=[*valid.values()])
        changed = {update.client: update for update in replaced or ()}
        if unknown := sorted(set(changed).difference(valid)):
            fault = f"returned an update of client {unknown[0]}, which sent none"
            raise PluginContractError.of(plugin.name, fault, hook="all_updates", round=current.number)
        valid.update(changed)
    return [(task, valid.get(task.client, outcome)) for task, outcome in arrived]


def _checked_cohort(cohort: Iterable[int], federation: Federation, plugin: str) -> dict[int, int | None]:
    """Return a cohort in ascending order: client -> its local epochs or ``Steps``, or None for the run's work.

    :raises PluginContractError: the cohort is empty, an id is unknown or repeated, a number is not whole, or a client
        cannot do so much work.
    """
    ids, clients = whole_numbers(cohort, plugin, "select_clients"), federation.config.training_clients
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= clients:
        expected = f"distinct ids from 0 to {clients - 1}"
        raise PluginContractError.of(plugin, f"returned {ids[:10]}", hook="select_clients", expected=expected)
    if not isinstance(cohort, Mapping):
        return dict.fromkeys(sorted(ids))
    config, breaks = federation.config, federation.setup.breaks
    numbers = whole_numbers(cohort.values(), plugin, "select_clients")
    steps = [isinstance(value, Steps) for value in cohort.values()]
    if config.local_steps is not None and not all(steps):
        fault, hint = "gives clients local epochs, but the run has --local-steps", "return fedcore.Steps(number)"
        raise PluginContractError.of(plugin, fault, hook="select_clients", hint=hint)
    if config.local_steps is None and any(steps) and (breaks or not isinstance(federation.system, Everybody)):
        fault = "gives clients steps, but exchanges and --system count local epochs"
        raise PluginContractError.of(plugin, fault, hook="select_clients", hint="return numbers of local epochs")
    most, least = config.local_epochs, max(breaks, default=0) + 1
    work = {ids[k]: Steps(number) if steps[k] else number for k, number in enumerate(numbers)}
    for client, number in work.items():
        if not (number >= 1 if isinstance(number, Steps) else least <= number <= most):
            after = f", after the exchange at epoch {least - 1}" if least > 1 else ""
            unit, limit = ("steps", "") if isinstance(number, Steps) else ("epochs", f" to {most} (--local-epochs)")
            expected = f"a whole number from {least}{limit}{after}"
            fault = f"gives client {client} {number} local {unit}"
            raise PluginContractError.of(plugin, fault, hook="select_clients", expected=expected)
    return {client: work[client] for client in sorted(ids)}


def _next_state(current: Round, collector: Collector) -> ServerState:
    """Return the state to commit. Without an accepted update the model and the plugins' states do not change."""
    committed, system = current.committed, current.federation.system
    unchanged = {"model": committed.model, "plugins": committed.plugins}
    return current.commit(
        round=current.number + 1,
        manifest={**committed.manifest, **collector.versions},
        virtual_time=committed.virtual_time + system.round_seconds(current.number, current.simulated.values()),
        **({"outliers": current.outliers} if current.accepted else unchanged),
    )


def _record(current: Round, collector: Collector, state: ServerState) -> dict[str, Any]:
    record = {
        "round": current.number,
        "lr": current.lr,
        "cohort": current.cohort,
        "accepted": len(current.accepted),
        "losses": collector.mean_losses(),
        **current.record(),
    }
    if current.work:
        unit = "local_steps" if isinstance(next(iter(current.work.values())), Steps) else "local_epochs"
        record[unit] = {str(client): int(current.work[client]) for client in current.cohort}
    took_part = sorted(current.accepted)
    if system := current.federation.system.record(current.number, current.simulated, took_part, current.work):
        record |= {"virtual_time": state.virtual_time, "system": system}
    return record


def run_post_train(federation: Federation, committed: ServerState) -> tuple[ServerState, dict[str, Any]]:
    """Run every ``post_train``; return the state to commit, and the line of metrics.jsonl."""
    with ServerScope(federation, committed, committed.round, "post_train") as scope:
        federation.setup.plugins.call_all("post_train", server=ScopeContext(scope))
    return scope.commit(), {"phase": "post_train", **scope.record()}
