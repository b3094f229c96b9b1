"""Broadcasts to one client: who gets which, from which state, counted how, and how many are in memory at once."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from fedcore import Plugin, PluginContractError, hookimpl
from fedcore.base.errors import PluginCallError
from fedcore.client.messages import ClientTask
from fedcore.engines.in_process import InProcessEngine
from fedcore_testing import check_engine, interrupted, name_of, personal_state
from fedcore_testing.probe import ProbeOfEach
from fedcore_workers import pack_task
from tests.sentences import raises
from tests.support import client_state, committed, lines, model_bytes

NAME = name_of(ProbeOfEach)


class CountsUpdates(Plugin):
    """Sends the number of updates that the server has seen, and each client's own row."""

    @hookimpl
    def begin_round(self, server):
        server.state["rows"] = torch.arange(4.0) + 10 * server.round

    @hookimpl
    def broadcast_to(self, server, client):
        assert list(server.accepted) == []
        rows = server.state["rows"]
        rows[client] += 0.5  # the state's own copy for this call
        return {"row": rows, "updates": torch.tensor(server.state.get("updates", 0))}

    @hookimpl
    def begin_local(self, client):
        client.state["received"] = client.received["row"]
        client.state["updates"] = client.received["updates"]

    @hookimpl
    def accumulate(self, server, update):
        server.state["updates"] = server.state.get("updates", 0) + 1
        server.state["rows"].zero_()


def test_each_client_sees_the_state_as_the_round_began_whatever_has_arrived(go):
    result = go(CountsUpdates, rounds=2, max_waiting=1)
    for client in range(4):
        state = client_state(result, client)["countsupdates"]
        expected = torch.arange(4.0) + 10
        expected[client] += 0.5
        assert torch.equal(state["received"], expected)
        assert int(state["updates"]) == 4
    assert committed(result).plugins["countsupdates"]["updates"] == 8
    assert torch.equal(committed(result).plugins["countsupdates"]["rows"], torch.zeros(4))


class SendsBoth(Plugin):
    """One plugin for all clients, beside one for each."""

    @hookimpl
    def broadcast(self):
        return {"all": torch.ones(3)}

    @hookimpl
    def begin_local(self, client):
        assert set(client.received) == {"all"}


class EvaluatesWhatItGot(Plugin):
    """The personal model is the global one where the client's own message arrived, and fails otherwise."""

    @hookimpl
    def broadcast_to(self, server, client):
        return {"own": torch.tensor(float(client)), "round": torch.tensor(server.round)}

    @hookimpl
    def personal_model(self, client):
        assert float(client.received["own"]) == client.id
        assert int(client.received["round"]) == client.round


def test_evaluation_sends_them_too_and_the_ledger_counts_those_of_training(go):
    result = go(SendsBoth, EvaluatesWhatItGot, ProbeOfEach, participation=0.5, client_test_fraction=0.2, rounds=2)
    for line in lines(result):
        assert line["failures"] == []
        assert line["metrics"]["personal"]["clients"] == 4
        down = {name: counts["down"] for name, counts in line["bytes"]["by_plugin"].items()}
        assert down["sendsboth"] == 2 * 12
        assert down["evaluateswhatitgot"] == 2 * (4 + 8)
        assert down["probeofeach"] == sum(4 * (client + 1) for client in line["cohort"])


def test_a_client_that_was_reached_and_then_lost_counts(go):
    system = {"dropout": 0.5, "no_show": 0.3}
    result = go(ProbeOfEach, clients=8, rounds=2, local_epochs=2, system=system, min_clients=0)
    lost = 0
    for line in lines(result):
        away = {failure["client"] for failure in line["failures"] if failure["kind"] == "unavailable"}
        lost += len(line["failures"]) - len(away)
        reached = set(line["cohort"]) - away
        found = line["bytes"]["by_plugin"]["probeofeach"]["down"]
        assert found == sum(4 * (client + 1) for client in reached)
    assert lost > 0


def test_no_cohorts_messages_are_in_memory_at_once(go):
    alive: list[weakref.ref] = []
    most = 0

    class Large(Plugin):
        @hookimpl
        def broadcast_to(self, server, client):
            nonlocal most
            message = torch.zeros(1000)
            alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(message)]
            most = max(most, len(alive))
            return {"large": message}

    go(Large, clients=12, rounds=2)
    assert 1 <= most <= 2


@pytest.mark.parametrize("hook", ["broadcast", "broadcast_to"])
def test_the_state_cannot_be_written_in_a_broadcast(go, hook):
    def writes(self, server):
        server.state["last"] = server.round

    with raises(PluginContractError, "'writes'", "'last'", hook):
        go(type("Writes", (Plugin,), {hook: hookimpl(writes)}))


def test_an_error_in_it_ends_the_run_as_in_every_broadcast(go):
    class Fails(Plugin):
        @hookimpl
        def broadcast_to(self, server, client):
            if client == 2:
                raise ValueError("no row")

    with raises(PluginCallError, "1", "2"):
        go(Fails)


def test_a_stopped_run_goes_on_to_the_same_bits(go, tmp_path):
    options = {"clients": 3, "rounds": 3, "participation": 0.7, "samples": 300}
    whole, stopped = go(CountsUpdates, **options), interrupted(tmp_path, CountsUpdates, after=1, **options)
    assert model_bytes(whole) == model_bytes(stopped)
    for client in range(3):
        assert personal_state(whole, client, "countsupdates").keys() == {"received", "updates"}
        one, other = (client_state(result, client)["countsupdates"] for result in (whole, stopped))
        assert torch.equal(one["received"], other["received"])
    assert lines(whole) == lines(stopped)


def test_an_engine_that_drops_them_is_found(tmp_path):
    class Drops(InProcessEngine):
        def run(self, tasks, *, window=None):
            kept = {task.id: task for task in tasks}
            bare = [replace(task, compute=None) if task.kind == "fit_begin" else task for task in kept.values()]
            for task, outcome in super().run(bare, window=window):
                yield kept[task.id], outcome

    with raises(AssertionError, "0"):
        check_engine(Drops, tmp_path, workers=(1,))


def test_a_clients_own_tensors_are_computed_when_its_task_is_sent():
    calls = []

    def compute():
        calls.append(1)
        return {"p/a": torch.ones(2), "p/b": torch.zeros(1)}

    task = ClientTask("t", "fit_begin", 0, 0, compute=compute)
    tensors, meta = pack_task(task)
    assert (len(calls), sorted(tensors), "compute" in meta) == (1, ["p/a", "p/b"], False)
    assert sorted(task.complete().tensors) == ["p/a", "p/b"]
