"""The hand cases of baselines.md through the real round loop, and the identities between methods."""

from __future__ import annotations

import pytest
import torch

from fedcore import Plugin, hookimpl
from fedcore.testing import EqualWeights
from tests.methods import (
    Ditto,
    FedAvgM,
    FedDC,
    FedDyn,
    FedNova,
    FedPer,
    Pull,
    Scaffold,
    Solo,
)
from tests.support import TOY, client_state, committed, model_bytes, run, weights

W = "encoder.base.w"


def near(tensor, values, tolerance=1e-6):
    torch.testing.assert_close(tensor, torch.tensor(values), rtol=0, atol=tolerance)


def server_state(result, plugin):
    return committed(result).plugins.get(plugin, {})


@pytest.mark.parametrize(("steps", "expected"), [(1, 1.09), (2, 1.2511), (3, 1.458469)])
def test_0_optimizer_has_pytorchs_momentum_and_weight_decay(toy, steps, expected):
    """Gradient w - 2, weight decay 0.1, momentum 0.9, lr 0.1, from 1."""
    result = toy(
        dataset="module:tests.toy.middle",
        model="module:tests.toy.at_ones",
        clients=1,
        local_epochs=steps,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.1,
    )
    near(weights(result)[W], [expected, expected])


def test_the_momentum_buffer_is_new_in_each_round(toy):
    options = {"dataset": "module:tests.toy.middle", "model": "module:tests.toy.at_ones", "clients": 1}
    result = toy(**options, local_epochs=1, rounds=2, lr=0.1, momentum=0.9)
    near(weights(result)[W], [1.19, 1.19])  # 1.28 with a buffer that survived


def test_fedavg(toy):
    near(weights(toy())[W], [0.375, 2.25], 0)


def test_fedprox(toy):
    near(weights(toy(("fedprox", {"mu": 1.0})))[W], [0.25, 1.5], 0)


def test_scaffold(toy):
    one, two = toy(Scaffold), toy(Scaffold, rounds=2)
    near(weights(one)[W], [0.75, 1.5])
    near(server_state(one, "scaffold")[W], [-0.75, -1.5])
    near(client_state(one, 0)["scaffold"][W], [-1.5, 0.0])
    near(client_state(one, 1)["scaffold"][W], [0.0, -3.0])
    near(weights(two)[W], [0.9375, 1.875])
    near(server_state(two, "scaffold")[W], [-0.1875, -0.375])
    near(client_state(two, 0)["scaffold"][W], [-1.125, 1.5])
    near(client_state(two, 1)["scaffold"][W], [0.75, -2.25])
    near(weights(toy(Scaffold, rounds=20))[W], [1.0, 2.0], 1e-3)


def test_scaffolds_c_is_the_mean_of_all_c_i_under_partial_participation(toy):
    result = toy(Scaffold, rounds=5, participation=0.5, momentum=0.5)
    own = [client_state(result, client).get("scaffold", {}).get(W, torch.zeros(2)) for client in range(2)]
    assert any(record["cohort"] == [0] for record in _records(result))
    assert any(record["cohort"] == [1] for record in _records(result))
    near(server_state(result, "scaffold")[W], ((own[0] + own[1]) / 2).tolist(), 1e-5)


def _records(result):
    from fedcore.runs.directory import RunDirectory

    return RunDirectory(result.directory).read_metrics()


def test_feddyn(toy):
    one, two = toy(FedDyn), toy(FedDyn, rounds=2)
    near(weights(one)[W], [1.0, 2.0])
    near(server_state(one, "feddyn")[W], [-0.5, -1.0])
    near(client_state(one, 0)["feddyn"][W], [-1.0, 0.0])
    near(client_state(one, 1)["feddyn"][W], [0.0, -2.0])
    near(weights(two)[W], [1.0, 2.0])
    near(server_state(two, "feddyn")[W], [-0.25, -0.5])
    near(client_state(two, 0)["feddyn"][W], [-1.0, 1.0])
    near(client_state(two, 1)["feddyn"][W], [0.5, -2.0])


def test_feddc(toy):
    one, two = toy(FedDC), toy(FedDC, rounds=2)
    near(weights(one)[W], [1.0, 2.0])
    near(server_state(one, "feddc")[f"s.{W}"], [-0.5, -1.0])
    near(weights(two)[W], [1.0, 2.0])
    near(server_state(two, "feddc")[f"s.{W}"], [0.25, 0.5])
    near(client_state(two, 0)["feddc"][f"h.{W}"], [0.75, -0.5])
    near(client_state(two, 1)["feddc"][f"h.{W}"], [-0.25, 1.5])
    near(client_state(two, 0)["feddc"][f"s.{W}"], [-0.25, 1.5])
    near(client_state(two, 1)["feddc"][f"s.{W}"], [0.75, -0.5])


def test_feddc_without_its_linear_term_is_feddyn(toy):
    for rounds in (1, 2, 3):
        dc, dyn = toy((FedDC, {"linear": False}), rounds=rounds, participation=0.5), None
        dyn = toy(FedDyn, rounds=rounds, participation=0.5)
        near(weights(dc)[W], weights(dyn)[W].tolist())


class OneAndThree(Plugin):
    """Counts client 0 as one sample and client 1 as three, as the hand case has it."""

    @hookimpl
    def pre_aggregate(self, update):
        from dataclasses import replace

        return replace(update, samples={0: 1, 1: 3}[update.client])


NOVA = {
    "dataset": "module:tests.toy.nova_centres",
    "partition": "module:tests.toy.all_but_last",
    "local_epochs": 1,
    "batch_size": 1,
}


def test_fednova(toy):
    near(weights(toy(OneAndThree, **NOVA))[W], [0.375, 1.5], 0)
    near(weights(toy(FedNova, OneAndThree, **NOVA))[W], [0.234375, 1.875])


def test_fedavgm(tmp_path):
    options = {**TOY, "dataset": "module:tests.toy.one_centre", "clients": 1, "local_epochs": 1, "lr": 1.0}
    for rounds, expected in ((1, 1.0), (2, 2.4)):
        result = run(tmp_path, Pull, FedAvgM, **{**options, "rounds": rounds})
        near(weights(result)[W], [expected, expected])


def test_ditto(toy):
    options = {"dataset": "module:tests.toy.one_centre", "clients": 1, "lr": 0.1}
    for steps, expected in ((1, [1.0, 0.8]), (2, [1.0, 0.64])):
        result = toy((Ditto, {"start": 1.0}), local_epochs=steps, **options)
        near(client_state(result, 0)["ditto"][W], expected)
    near(weights(result)[W], [0.38, 0.0])  # w is FedAvg's


def test_fedper(toy):
    options = {"dataset": "module:tests.toy.heads", "model": "module:tests.toy.base_and_head", "lr": 1.0}
    for rounds in (1, 2):
        result = toy(FedPer, local_epochs=1, rounds=rounds, **options)
        near(weights(result)[W], [2.5])
        near(weights(result)["classifier.h"], [0.0], 0)  # the initial one
        near(client_state(result, 0)["fedcore"]["personal.classifier.h"], [7.0])
        near(client_state(result, 1)["fedcore"]["personal.classifier.h"], [-7.0])
    assert result.metrics["global"] is None
    assert "classifier" in result.metrics["global_reason"]
    assert result.metrics["personal_global"]["clients"] == 2
    per_client = committed(result).ledger["by_plugin"]["model"]["up"] / 4
    assert per_client == 4  # one float, twice, from two clients


def test_solo(toy):
    result = toy(Solo, rounds=2)
    near(client_state(result, 0)["fedcore"][f"personal.{W}"], [1.875, 0.0], 0)
    near(client_state(result, 1)["fedcore"][f"personal.{W}"], [0.0, 3.75], 0)
    near(weights(result)[W], [0.0, 0.0], 0)
    assert committed(result).ledger["up"] == 0
    assert result.metrics["global"] is None


DIGITS = {"rounds": 2, "local_epochs": 2, "participation": 0.5}


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    return model_bytes(run(tmp_path_factory.mktemp("fedavg"), **DIGITS))


@pytest.mark.parametrize(
    "method",
    [
        ("fedprox", {"mu": 0.0}),
        ("moon", {"mu": 0.0, "projection": False}),
        (FedAvgM, {"beta": 0.0}),
        Ditto,
        (FedPer, {"patterns": []}),
        "fedavg",
    ],
    ids=str,
)
def test_neutral_options_are_fedavg_bit_by_bit(go, fedavg, method):
    assert model_bytes(go(method, **DIGITS)) == fedavg


@pytest.mark.parametrize("method", [("fedprox", {"mu": 1.0}), FedAvgM, Scaffold], ids=str)
def test_other_options_are_not(go, fedavg, method):
    assert model_bytes(go(method, **DIGITS)) != fedavg


def test_fednova_with_equal_steps_is_fedavg(toy):
    plain = toy(rounds=2)  # K is 2 on both clients
    near(weights(toy(FedNova, rounds=2))[W], weights(plain)[W].tolist())


def test_round_1_of_scaffold_is_fedavg_with_uniform_weights(toy):
    assert torch.equal(weights(toy(Scaffold))[W], weights(toy(EqualWeights))[W])


def test_round_1_of_moon_is_fedavg(go):
    neutral = {"mu": 0.0}
    assert model_bytes(go("moon")) == model_bytes(go(("moon", neutral)))
    assert model_bytes(go("moon", rounds=2)) != model_bytes(go(("moon", neutral), rounds=2))


def test_moon_with_a_projection_starts_like_any_run_with_one(go):
    assert model_bytes(go(("moon", {"mu": 0.0}))) == model_bytes(go(projection=True))


def test_fedper_trains_what_solo_trains_when_everything_is_personal(go):
    """Section 16: FedPer(head = all) = SOLO; the personal models are equal, and the global one never moves."""
    per, solo = go((FedPer, {"patterns": ["*"]}), rounds=2), go(Solo, rounds=2)
    for client in range(4):
        one, other = client_state(per, client)["fedcore"], client_state(solo, client)["fedcore"]
        assert set(one) == set(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert per.metrics["personal_global"] == solo.metrics["personal_global"]
