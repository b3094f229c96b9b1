"""Updates on their way up: what pre_upload and payloads carry, and what a rejection leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcore import Plugin, RejectUpdate, hookimpl
from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.runs.directory import RunDirectory
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_testing import W, same_tensors
from tests.sentences import raises
from tests.support import FEW, client_state, committed, lines, model_bytes, weights


class Halve(Plugin):
    """Sends half of what the client learned."""

    @hookimpl
    def begin_local(self, client):
        client.scratch["start"] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}

    @hookimpl
    def pre_upload(self, client, update):
        start = client.scratch["start"]
        return replace(update, model={name: start[name] + (w - start[name]) / 2 for name, w in update.model.items()})


def test_pre_upload_changes_what_goes_up(toy):
    assert weights(toy(Halve))[W].tolist() == [0.375 / 2, 2.25 / 2]
    assert weights(toy(Halve, (type("Again", (Halve,), {}), {})))[W].tolist() == [0.375 / 4, 2.25 / 4]


def test_previous_is_the_trained_model_before_pre_upload_and_end_local_edit_it(toy):
    class Editor(Halve):
        reads = ("previous",)

        @hookimpl
        def end_local(self, client):
            with torch.no_grad():
                client.model.encoder.base.w.fill_(9.0)

    result = toy(Editor)
    assert client_state(result, 0)["fedcore"]["previous/parameters"].tolist()[:2] == [1.5, 0.0]
    assert weights(result)[W].tolist() == [4.5, 4.5], "what end_local wrote into the model goes up"


class Payload(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"n": torch.tensor([float(client.n)]), "id": torch.tensor([client.id])}

    @hookimpl
    def accumulate(self, server, update):
        server.state["order"] = [*server.state.get("order", []), int(update.payload.pop("id"))]
        server.state["n"] = server.state.get("n", 0.0) + float(update.payload["n"])
        server.state["left"] = sorted(update.payload)


def test_accumulate_in_dispatch_order_with_its_own_payload(go):
    result = go(Payload)
    kept = committed(result).plugins["payload"]
    assert kept["n"] == 4 * FEW
    assert kept["left"] == ["n"]
    assert sorted(kept["order"]) == [0, 1, 2, 3]
    partition = resolve_partition(*resolve_config(RunDirectory(result.directory).read_config()))
    assert kept["order"] == sorted(range(4), key=lambda k: (-len(partition.train[k]), k))
    counted = lines(result)[0]["bytes"]["by_plugin"]["payload"]
    assert counted == {"down": 0, "up": 4 * (4 + 8)}


class PayloadKeeper(Plugin):
    """Sends a number up, doubles it in pre_upload and adds one in pre_aggregate."""

    @hookimpl
    def end_local(self, client):
        return {"n": torch.tensor([1.0])}

    @hookimpl
    def pre_upload(self, update):
        return replace(update, payload={"n": update.payload["n"] * 2})

    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, payload={"n": update.payload["n"] + 1})

    @hookimpl
    def accumulate(self, server, update):
        server.state["n"] = float(update.payload["n"])


def test_payload_through_pre_upload_and_pre_aggregate(toy):
    assert committed(toy(PayloadKeeper)).plugins["payloadkeeper"]["n"] == 3.0


class Inspecting(Plugin):
    """Looks at the update on both sides and leaves it as it is."""

    @hookimpl
    def end_local(self, client):
        return {"n": torch.tensor([1.0])}

    @hookimpl
    def pre_upload(self, update):
        return None

    @hookimpl
    def pre_aggregate(self, update):
        return None

    @hookimpl
    def accumulate(self, server, update):
        server.state["seen"] = sorted(update.payload)


def test_pre_upload_that_only_looks(toy):
    plain = toy()
    result = toy(Inspecting)
    assert same_tensors(weights(result), weights(plain))
    assert committed(result).plugins["inspecting"]["seen"] == ["n"]


class OthersPayload(Plugin):
    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, payload={})

    @hookimpl
    def accumulate(self, server, update):
        server.state["seen"] = sorted(update.payload)


def test_a_plugin_cannot_touch_anothers_payload(toy):
    kept = committed(toy(OthersPayload, Payload)).plugins
    assert kept["otherspayload"]["seen"] == []
    assert kept["payload"]["n"] == 4.0


class Choose(Plugin):
    @hookimpl
    def select_clients(self, server):
        return [0, 1, 3]


class Refuse(Plugin):
    @hookimpl
    def pre_aggregate(self, server, update):
        if update.client == 2:
            raise RejectUpdate("too odd")


class Traces(Plugin):
    """Leaves a trace of every update it sees wherever it can."""

    reads = ("previous",)

    @hookimpl
    def begin_local(self, client):
        client.state["rounds"] = client.state.get("rounds", 0) + 1

    @hookimpl
    def accumulate(self, server, update):
        server.state[str(update.client)] = server.state.get(str(update.client), 0) + 1


def test_a_rejected_update_leaves_no_trace(go):
    without, result = go(Choose, Traces, rounds=2), go(Refuse, Traces, rounds=2)
    assert model_bytes(result) == model_bytes(without)
    assert committed(result).plugins == committed(without).plugins
    assert 2 not in committed(result).manifest
    assert client_state(result, 2) == {}
    for record, other in zip(lines(result), lines(without)):
        assert record["failures"] == [{"client": 2, "kind": "rejected", "message": "too odd"}]
        assert record["accepted"] == 3
        assert record["losses"] == other["losses"]
        assert record["cohort"] == [0, 1, 2, 3]


def test_a_client_rejected_once_starts_from_its_last_accepted_state(go):
    class RefuseOnce(Plugin):
        @hookimpl
        def pre_aggregate(self, server, update):
            if update.client == 2 and server.round == 1:
                raise RejectUpdate("not now")

    kept = client_state(go(RefuseOnce, Traces, rounds=3), 2)["traces"]
    assert kept == {"rounds": 2}


class Counting(Plugin):
    @hookimpl
    def pre_aggregate(self, server, update):
        server.state["seen"] = server.state.get("seen", 0) + 1


def test_what_pre_aggregate_wrote_about_a_rejected_update_is_gone_too(go):
    assert committed(go(Counting, Refuse)).plugins["counting"]["seen"] == 3


class Sums(Plugin):
    """Adds up in every way: a running sum, an edit in place, a value in a list."""

    @hookimpl
    def accumulate(self, server, update):
        server.state.add("sum", update.model[W])
        server.state.setdefault("steps", torch.zeros(1)).add_(update.steps)
        server.state.setdefault("clients", []).append(update.client)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RejectUpdate("too odd"), "too odd"),
        (KeyError("x"), "plugin 'refusal' hook {} (round 1, client 1) raised KeyError: 'x' (test_updates.py:{})"),
        (
            ConfigError("odd"),
            "plugin 'refusal' hook {} (round 1, client 1) raised ConfigError: odd (test_updates.py:{})",
        ),
    ],
)
@pytest.mark.parametrize("hook", ["pre_aggregate", "weight", "accumulate"])
def test_any_hook_that_sees_an_update_can_reject_it(toy, hook, error, words):
    """The plugins before and after it have written nothing about it."""

    def refuse(self, server, update):
        if update.client == 1:
            raise error

    class First(Plugin):
        @hookimpl
        def select_clients(self, server):
            return [0]

    refusal = type("Refusal", (Plugin,), {hook: hookimpl(refuse)})
    without, result = toy(First, Sums, Counting), toy(Sums, refusal, Counting)
    assert model_bytes(result) == model_bytes(without)
    kept, expected = committed(result).plugins, committed(without).plugins
    assert kept["sums"].pop("sum").equal(expected["sums"].pop("sum"))
    assert kept == expected
    said = words.format(hook, refuse.__code__.co_firstlineno + 2)
    assert lines(result)[0]["failures"] == [{"client": 1, "kind": "rejected", "message": said}]


@pytest.mark.parametrize("hook", ["pre_aggregate", "weight", "accumulate"])
@pytest.mark.parametrize("least", [0, 1])
def test_a_plugin_that_raises_for_every_client_ends_the_run_with_its_error(toy, hook, least):
    def fault(self, update):
        raise KeyError("x")

    with raises(PluginContractError, "'faulty'", hook, "'x'") as caught:
        toy(type("Faulty", (Plugin,), {hook: hookimpl(fault)}), min_clients=least)
    assert caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code is fault.__code__


class Replace(Plugin):
    @hookimpl
    def pre_aggregate(self, server, update):
        return replace(update, model={**update.model, W: server.model[W] + update.client})


def test_pre_aggregate_replaces(toy):
    assert weights(toy(Replace))[W].tolist() == [0.75, 0.75]


@pytest.mark.parametrize("fault", ["nan", "missing", "client", "samples", "payload"])
def test_a_replaced_update_is_checked_again(toy, fault):
    class Damage(Plugin):
        @hookimpl
        def pre_aggregate(self, server, update):
            if update.client == 1:
                return {
                    "nan": replace(update, model={W: torch.tensor([torch.nan, 0.0])}),
                    "missing": replace(update, model={}),
                    "client": replace(update, client=0),
                    "samples": replace(update, samples=0),
                    "payload": replace(update, payload={"x": 1.0}),
                }[fault]
            return None

    result = toy(Damage)
    assert [(f["client"], f["kind"]) for f in lines(result)[0]["failures"]] == [(1, "rejected")]
    assert weights(result)[W].tolist() == [1.5, 0.0]


def with_metrics(**more):
    class Adds(Plugin):
        @hookimpl
        def pre_upload(self, client, update):
            return replace(update, metrics={**update.metrics, **more})

        @hookimpl
        def accumulate(self, server, update):
            server.state["metrics"] = dict(update.metrics)

    return Adds


def test_metrics_are_the_same_from_every_engine(toy):
    kept = committed(toy(with_metrics(classes={0: 1.0}, pair=(1, 2)), workers=0)).plugins["adds"]["metrics"]
    assert (kept["classes"], kept["pair"]) == ({"0": 1.0}, [1, 2])


def test_metrics_that_are_not_json_name_the_hook(toy):
    with raises(PluginContractError, "'adds'", "pre_upload", "update.metrics", "Tensor"):
        toy(with_metrics(gap=torch.tensor(1.0)))


@pytest.mark.parametrize("hook", ["begin_local", "end_local", "personal_model"])
def test_an_edit_of_what_all_clients_received_is_refused(toy, hook):
    def edit(self, client):
        client.received["c"].add_(1)

    def send(self, server):
        return {"c": torch.zeros(()).add_(1)}

    edits = type("Edits", (Plugin,), {hook: hookimpl(edit), "broadcast": hookimpl(send)})
    with raises(PluginContractError, "'edits'", "round 1", "client.received['c']"):
        toy(edits)


@pytest.mark.parametrize("hook", ["begin_local", "observe", "end_local"])
def test_an_edit_of_the_weights_that_all_clients_start_from_is_refused(toy, hook):
    def edit(self, client):
        next(iter(client.start.values())).mul_(2)

    def edit_reference(self, step):
        step.reference[0].mul_(2)

    edits = type("Edits", (Plugin,), {hook: hookimpl(edit_reference if hook == "observe" else edit)})
    with raises(PluginContractError, "client.start[", "round 1"):
        toy(edits)
