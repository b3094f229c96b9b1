"""From updates to the next model: weights, owned parameters, steps on the server."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedcore import Plugin, hookimpl
from fedcore.base.errors import DivergedError, PluginCallError, PluginContractError, RejectUpdate, RoundFailedError
from fedcore_testing import W, same_tensors
from tests.sentences import raises
from tests.support import committed, lines, model_bytes, weights

BATCH_NORM = {"model": "module:tests.toy.batch_norm_mlp"}


@pytest.mark.parametrize("kind", [float, np.float32, Fraction])
def test_weight(toy, kind):
    class Weigh(Plugin):
        @hookimpl
        def weight(self, update):
            return {0: kind(3), 1: None}[update.client]  # None: the default, its three samples

    assert weights(toy(Weigh))[W].tolist() == [0.75, 1.5]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_rejects_that_update(toy, bad):
    class Weigh(Plugin):
        @hookimpl
        def weight(self, update):
            return bad if update.client == 1 else 1.0

    result = toy(Weigh)
    assert weights(result)[W].tolist() == [1.5, 0.0]
    (failure,) = lines(result)[0]["failures"]
    assert failure["message"].startswith("client 1: plugin 'weigh' hook weight returned ")


@pytest.mark.parametrize(("weight", "total"), [(0.0, "0.0"), (1e308, "inf")])
def test_weights_without_a_mean_stop_the_run(toy, weight, total):
    class Weigh(Plugin):
        @hookimpl
        def weight(self):
            return weight

    with raises(RoundFailedError, total, "'weigh'", "weight"):
        toy(Weigh)


class Numb(Plugin):
    """Spoils updates after they were validated."""

    @hookimpl
    def pre_aggregate(self, server, update):
        return replace(update, model={name: tensor * torch.nan for name, tensor in update.model.items()})


class SendsNan(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"spread": torch.tensor([1.0, torch.nan])}


@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        (Numb, ("pre_aggregate", "'numb'")),
        (SendsNan, ("1", "0", "'spread'", "'sendsnan'")),
    ],
)
def test_what_a_plugin_spoils_is_not_called_a_divergence(toy, plugin, named):
    with raises(RoundFailedError, *named) as caught:
        toy(plugin)
    assert not isinstance(caught.value, DivergedError)


@pytest.mark.parametrize("hook", ["begin_round", "aggregate", "server_step", "report", "post_train"])
def test_a_fault_on_the_server_names_plugin_and_hook(toy, hook):
    """RejectUpdate, too, which no such hook can raise: functions for the checks of tensors do."""
    for error in (RejectUpdate("no such name"), KeyError("no such name")):
        contents = {"owns": ("*",)} if hook == "aggregate" else {}
        cls = type("Faulty", (Plugin,), {hook: hookimpl(_raising(error)), **contents})
        with raises(PluginContractError, "'faulty'", hook):
            toy(cls)


def _raising(error):
    def fault(self, server):
        raise error

    return fault


class FailsOnce(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.id == 1:
            raise ValueError("a client of its own")


@pytest.mark.parametrize(("others", "options"), [([], {"system": {"dropout": 0.5}}), ([FailsOnce], {})])
def test_a_fault_with_every_update_that_arrives_ends_the_run(toy, others, options):
    class Faulty(Plugin):
        @hookimpl
        def accumulate(self, server, update):
            raise KeyError("typo")

    with raises(PluginCallError, "'faulty'", "'typo'"):
        toy(Faulty, *others, seed=0, min_clients=0, **options)


class OwnClassifier(Plugin):
    owns = ("classifier.*",)

    @hookimpl
    def aggregate(self, server, updates):
        assert all(sorted(update.model) == ["classifier.bias", "classifier.weight"] for update in updates)
        assert [update.client for update in updates] == list(server.accepted)
        return {"classifier.bias": sum(update.model["classifier.bias"] for update in updates)}


def test_aggregate_fills_a_part_and_the_mean_the_rest(go):
    plain, result = weights(go()), weights(go(OwnClassifier))
    different = [name for name in plain if not torch.equal(plain[name], result[name])]
    assert different == ["classifier.bias"]


def averages(self, updates):
    return {name: sum(update.model[name] for update in updates) / len(updates) for name in updates[0].model}


def idle(self):
    return None


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        ({"aggregate": hookimpl(averages)}, ()),
        ({"mid_local_epoch": hookimpl(idle)}, ("mid_local_epoch",)),
        ({"owns": ("*",)}, ()),
        ({"corrects": ("*",)}, ("post_train",)),
        ({"encodes": ("*",), "pre_upload": hookimpl(idle)}, ("pre_aggregate",)),
    ],
)
def test_a_declaration_without_its_hook_and_a_hook_without_its_declaration_are_refused(toy, tmp_path, contents, named):
    with raises(PluginContractError, "'forgot'", *named):
        toy(type("Forgot", (Plugin,), contents))
    assert not list(tmp_path.rglob("config.yaml"))


def test_an_aggregation_that_owns_nothing_by_its_options_is_not_called(toy):
    def init(self, options):
        Plugin.__init__(self, options)
        self.owns = ()

    cls = type("Idle", (Plugin,), {"aggregate": hookimpl(lambda self: {}["never called"]), "__init__": init})
    assert model_bytes(toy(cls)) == model_bytes(toy())


class Finishes(Plugin):
    """Notes what the end of a round sees."""

    @hookimpl
    def accumulate(self, server, update):
        server.state["sum"] = server.state.get("sum", 0) + update.samples

    @hookimpl
    def server_step(self, server, mean):
        return {name: tensor + 1 for name, tensor in mean.items()}

    @hookimpl
    def end_round(self, server):
        server.state["total"], server.state["model"] = server.state.pop("sum"), server.model[W]


def test_the_end_of_a_round_sees_the_new_model_and_all_updates(toy):
    result = toy(Finishes, rounds=2)
    state = committed(result).plugins["finishes"]
    assert state["total"] == 4
    assert torch.equal(state["model"], weights(result)[W])


class OwnMean(Plugin):
    """The core's mean, asked for: of all updates, or of two of them."""

    owns = ("*",)
    clients = (0, 1, 2, 3)

    @hookimpl
    def aggregate(self, server, updates):
        assert server.mean_of([]) == {}
        return server.mean_of([update for update in updates if update.client in self.clients])


class TwoClients(OwnMean):
    clients = (1, 3)


class Squared(Plugin):
    """Another weight than samples; 0 for some clients."""

    without = ()

    @hookimpl
    def weight(self, update):
        return 0.0 if update.client in self.without else float(update.samples) ** 2


class WithoutOthers(Squared):
    without = (0, 2)


def test_the_mean_of_all_updates_is_the_cores_bit_by_bit(go):
    assert model_bytes(go(OwnMean, Squared, **BATCH_NORM)) == model_bytes(go(Squared, **BATCH_NORM))


def test_the_mean_of_some_updates_has_the_cores_weights(go):
    some, core = weights(go(TwoClients, Squared, rounds=1)), weights(go(WithoutOthers, rounds=1))
    assert same_tensors(some, core)


def test_the_mean_of_updates_without_a_weight_is_empty(go):
    """Then this plugin returns nothing, and the core's mean stays."""

    class Nobody(OwnMean):
        clients = (0, 2)

    assert model_bytes(go(Nobody, WithoutOthers)) == model_bytes(go(WithoutOthers))


def test_mean_of_is_for_aggregate_only(go):
    class Early(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.mean_of([])

    with raises(PluginContractError, "server.mean_of"):
        go(Early)


class OwnEncoder(Plugin):
    owns = ("encoder.*",)

    @hookimpl
    def aggregate(self, updates):
        return {}


def test_owned_names_that_stay_on_the_clients(go):
    assert model_bytes(go(OwnEncoder, buffers="local", **BATCH_NORM)) == model_bytes(go(buffers="local", **BATCH_NORM))


class Identity(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        assert all(server.model[name].shape == tensor.shape for name, tensor in mean.items())
        assert all(tensor.is_floating_point() for tensor in mean.values())
        return mean


def test_the_identity_as_server_step_is_fedavg_bit_by_bit(go):
    assert model_bytes(go(Identity, rounds=2, **BATCH_NORM)) == model_bytes(go(rounds=2, **BATCH_NORM))


class NextModel(Plugin):
    """Puts the next model together in server_step."""

    made: dict = {}

    @hookimpl
    def begin_round(self, server):
        assert server.buffers == {}

    @hookimpl
    def accumulate(self, server):
        assert server.buffers == {}

    @hookimpl
    def server_step(self, server, mean):
        NextModel.made = server.network({**mean, **server.buffers}).state_dict()


def test_the_mean_and_the_averaged_buffers_are_the_next_model(go):
    result = go(NextModel, rounds=2, **BATCH_NORM)
    assert same_tensors(NextModel.made, weights(result))
    assert any("running" in name for name in NextModel.made)


class Double(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        return {W: mean[W] * 2}


class PlusOne(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        return {W: mean[W] + 1}


def test_server_steps_build_on_each_other_in_user_order(toy):
    assert weights(toy(Double, PlusOne))[W].tolist() == [1.75, 5.5]
    assert weights(toy(PlusOne, Double))[W].tolist() == [2.75, 6.5]


def test_server_step_starts_from_the_current_model(toy):
    class Stay(Plugin):
        server_optimizer = True

        @hookimpl
        def server_step(self, server, mean):
            return {name: server.model[name] for name in mean}

    assert weights(toy(Stay, rounds=2))[W].tolist() == [0.0, 0.0]


class KeepsNan(Plugin):
    @hookimpl
    def end_round(self, server):
        server.state["sum"] = torch.full((2,), torch.nan if server.round == 1 else 1.0)


def test_a_plugins_state_that_is_not_finite_is_not_committed(toy, tmp_path):
    with raises(DivergedError, "2", "server.state", "'sum'", "'keepsnan'"):
        toy(KeepsNan, rounds=3, out=tmp_path / "run")
    state = committed(tmp_path / "run")
    assert (state.round, state.plugins["keepsnan"]["sum"].tolist()) == (1, [1.0, 1.0])
