"""FedAdam, FedYogi, FedAdagrad: hand cases, whole federations against NumPy, what the step leaves alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedcore_fedopt.equations
import fedcore_fedopt.plugin
from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore_fedopt import FedAdagrad, FedAdam, FedAdamOptions, FedYogi
from fedcore_testing import (
    FrozenEncoder,
    OwnsClassifier,
    Quadratic,
    StepsOnServer,
    W,
    analytic_federation,
    federations,
    model_bytes,
    plugin_state,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

PLUGINS = {"fedadam": FedAdam, "fedyogi": FedYogi, "fedadagrad": FedAdagrad}
CENTRES, SIZES = np.array([[2.0, 0.0], [0.0, 4.0], [-3.0, 1.0], [1.0, -2.0]]), (1, 2, 3, 5)
TOY = {**analytic_federation(CENTRES, SIZES), "lr": 0.2}
go = federations(clients=4, samples=400)


# --- the equations -----------------------------------------------------------------------------------------------


class Pull(Plugin):
    """Moves every client by +3 in round 0 and by -1 in round 1, at lr 1."""

    @hookimpl
    def task_loss(self, step):
        return -step.logits.mean(dim=0).sum() * (3.0 if step.round == 0 else -1.0)


HAND = {  # tau 1, so v starts at 1; Delta is 3, then -1; m is 1.5, then 0.25 with beta_1 0.5
    "fedadagrad": [10.0, 11.0],
    "fedadam": [5.0, 3.0],  # beta_2 0.5
    "fedyogi": [5.5, 5.0],  # 1 + 4.5, then 5.5 - 0.5
}


@pytest.mark.parametrize("name", PLUGINS)
def test_the_hand_case_through_the_round_loop(go, name):
    options = {"lr": 2.0, "tau": 1.0, "beta1": 0.5, **({} if name == "fedadagrad" else {"beta2": 0.5})}
    v = HAND[name]
    steps = [2 * 1.5 / (v[0] ** 0.5 + 1), 2 * 0.25 / (v[1] ** 0.5 + 1)]
    for rounds in (1, 2):
        result = go({Pull: {}, name: options}, **{**TOY, "lr": 1.0, "rounds": rounds})
        expected = torch.full((2,), sum(steps[:rounds]))
        torch.testing.assert_close(weights(result)[W], expected, rtol=0, atol=1e-6)
        assert plugin_state(result, name)[f"v.{W}"].tolist() == pytest.approx([v[rounds - 1]] * 2)


def reference(name, cohorts, lr_s, tau, beta1, beta2, lr, epochs):
    """The whole federation in float64, as Algorithm 2 is printed."""
    x, m, v = np.zeros(2), np.zeros(2), np.full(2, tau**2)
    for cohort in cohorts:
        n = np.array([SIZES[i] for i in cohort], dtype=float)
        moved = [(x - CENTRES[i]) * (1 - lr) ** epochs + CENTRES[i] - x for i in cohort]
        delta = (n / n.sum()) @ np.array(moved)
        m = beta1 * m + (1 - beta1) * delta
        if name == "fedadagrad":
            v = v + delta**2
        elif name == "fedyogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + lr_s * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize(("lr", "tau", "beta1", "beta2"), [(0.3, 1e-3, 0.9, 0.99), (1.0, 0.5, 0.0, 0.3)])
def test_the_whole_federation_against_numpy(go, name, lr, tau, beta1, beta2):
    options = {"lr": lr, "tau": tau, "beta1": beta1, **({} if name == "fedadagrad" else {"beta2": beta2})}
    result = go({Quadratic: {}, name: options}, **{**TOY, "rounds": 7, "participation": 0.5, "local_epochs": 3})
    cohorts = [line["cohort"] for line in records(result)]
    assert len({tuple(c) for c in cohorts}) > 2
    expected = reference(name, cohorts, lr, tau, beta1, beta2, 0.2, 3)
    np.testing.assert_allclose(weights(result)[W], expected, rtol=1e-5, atol=1e-5)


def test_yogis_moment_is_adams_where_the_square_is_larger_and_falls_more_slowly_where_it_is_smaller():
    delta, small, large = torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([100.0])
    yogi, adam = fedcore_fedopt.yogi, fedcore_fedopt.adam
    assert yogi(delta, small, 0.9).item() == pytest.approx(3.4)
    assert adam(delta, small, 0.9).item() == pytest.approx(3.1)
    assert adam(delta, large, 0.9).item() < yogi(delta, large, 0.9).item() < 100


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_a_second_moment_never_falls_below_0(name):
    generator, v = torch.Generator().manual_seed(0), torch.full((50,), 1e-6)
    for _ in range(200):
        v = getattr(fedcore_fedopt, name.removeprefix("fed"))(torch.randn(50, generator=generator), v, 0.0)
        assert (v >= 0).all()


def test_the_second_moment_of_small_movements_in_a_network_of_float16():
    """In float16 it stayed near tau^2: most squares are 0, and 0.99 of a number near 1e-6 is that number."""
    w = torch.zeros(100, dtype=torch.float16)
    plugin, server = FedAdam(FedAdamOptions()), SimpleNamespace(model={"w": w}, frozen=frozenset(), state={})
    for _ in range(400):
        (new,) = plugin.server_step(server, {"w": w + 1e-4}).values()
    assert new.dtype == torch.float16
    expected = 1e-8 + (1e-6 - 1e-8) * 0.99**400
    torch.testing.assert_close(server.state["v.w"], torch.full((100,), expected), rtol=0.02, atol=0)


# --- what is FedAvg ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fedavg(go):
    return go({}, rounds=3, participation=0.75)


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go, fedavg):
    runs = [(name, {}) for name in PLUGINS]
    runs += [(name, {option: value}) for name in PLUGINS for option, value in (("lr", 0.05), ("tau", 0.1))]
    runs += [("fedadagrad", {"beta1": 0.5}), ("fedadam", {"beta1": 0.0}), ("fedyogi", {"beta2": 0.9})]
    found = [model_bytes(go({name: change}, rounds=2, participation=0.75)) for name, change in runs]
    assert len({*found, model_bytes(fedavg)}) == len(runs) + 1


# --- what the step leaves alone ----------------------------------------------------------------------------------


def test_buffers_are_fedavgs_and_have_no_moments(go):
    """Round 1 trains from w_0, so buffers differ only if the server's step changed them."""
    run = {"model": with_batch_norm, "rounds": 1}
    result = go({"fedadam": {}}, **run)
    fedavg, fedadam = weights(go({}, **run)), weights(result)
    buffers = [name for name in fedavg if "running" in name or "tracked" in name]
    assert len(buffers) == 3
    assert all(torch.equal(fedadam[name], fedavg[name]) for name in buffers)
    kept = {name.partition(".")[2] for name in plugin_state(result, "fedadam")}
    assert kept == set(fedavg) - set(buffers)


def test_what_no_client_trained_does_not_drift_on_with_the_momentum(go):
    """The encoder is frozen from round 1 on; m remembers round 0."""
    first, third = (weights(go({"fedadam": {}, FrozenEncoder: {}}, rounds=rounds)) for rounds in (1, 3))
    frozen = [name for name in first if name.startswith("encoder.")]
    assert frozen
    assert all(torch.equal(first[name], third[name]) for name in frozen)
    assert not torch.equal(first["classifier.weight"], third["classifier.weight"])


@pytest.mark.parametrize("other", [OwnsClassifier, StepsOnServer])
def test_refused_beside_others_with_both_names_and_the_reason(go, other):
    with raises(PluginConflictError, "'fedadam'", repr(other.__name__.lower())):
        go({"fedadam": {}, other: {}})
