"""FedDC: hand cases, independent simulations, FedDC without its linear term is FedDyn, and s = mean s_i."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore_feddc import FedDC, FedDCOptions, client_weight
from fedcore_functional import correction, displaced_mean, renewed_control, renewed_displacement, shifted_target
from fedcore_testing import (
    Cohorts,
    EqualWeights,
    ExchangesClassifier,
    OwnsClassifier,
    RejectsClient1,
    StepsOnServer,
    W,
    client_state,
    distance_by_hand,
    federations,
    model_bytes,
    plugin_state,
    records,
    steps_by_hand,
    weights,
)
from fedcore_testing.drift import CENTRES, COHORTS, SIMULATED, SIZES, STATE_CHECKS, STEPS, TOY, near, toy_of
from tests.sentences import raises

NAME = "feddc"
UNIFORM = {"weighting": "uniform"}
DIGITS = {"clients": 4, "eval_every": 99, "samples": 400}
go = federations(**DIGITS)


@pytest.fixture(scope="module")
def toy(go):
    return toy_of(go)


# --- the equations -----------------------------------------------------------------------------------------------


def test_the_weight_of_a_client():
    assert (client_weight(3, None), client_weight(3, 12.0)) == (1.0, 0.25)


def test_the_terms_have_the_gradient_of_the_papers():
    """alpha (w - w_t + h_i) + s - s_i, by two nodes over the parameters themselves."""
    g = torch.Generator().manual_seed(2)
    w, w_t, h, s, own = torch.randn(5, 6, dtype=torch.float64, generator=g)
    w = nn.Parameter(w)

    class Client:
        scratch = {"target": {w: shifted_target(w_t, h)}, "gap": {w: correction(w, s, own)}, "alpha": 0.3}

    class Step:
        parameters, client = [w], Client

    losses = FedDC(FedDCOptions(alpha=0.3)).local_loss(Step)
    assert [loss.name for loss in losses] == ["drift", "gradient"]
    sum(loss.weight * loss.value for loss in losses).backward()
    expected = 0.3 * (w.detach() - w_t + h).numpy() + s.numpy() - own.numpy()
    np.testing.assert_allclose(w.grad, expected, rtol=1e-12)
    assert (expected > 0).any()
    assert (expected < 0).any()
    for loss in losses:
        assert [type(node).__name__ for node, _ in loss.value.grad_fn.next_functions if node] == ["AccumulateGrad"]


# --- in the round loop -------------------------------------------------------------------------------------------


def test_the_hand_case(toy):
    one, two = (toy({NAME: {"alpha": 1.0, **UNIFORM}}, rounds=rounds) for rounds in (1, 2))
    near(weights(one)[W], [1.0, 2.0])
    near(plugin_state(one, NAME)[f"s.{W}"], [-0.5, -1.0])
    near(plugin_state(one, NAME, 0)[f"h.{W}"], [1.0, 0.0])
    near(plugin_state(one, NAME, 1)[f"h.{W}"], [0.0, 2.0])
    near(plugin_state(one, NAME, 0)[f"s.{W}"], [-1.0, 0.0])
    near(plugin_state(one, NAME, 1)[f"s.{W}"], [0.0, -2.0])
    near(weights(two)[W], [1.0, 2.0])
    near(plugin_state(two, NAME)[f"s.{W}"], [0.25, 0.5])
    near(plugin_state(two, NAME, 0)[f"h.{W}"], [0.75, -0.5])
    near(plugin_state(two, NAME, 1)[f"h.{W}"], [-0.25, 1.5])
    near(plugin_state(two, NAME, 0)[f"s.{W}"], [-0.25, 1.5])
    near(plugin_state(two, NAME, 1)[f"s.{W}"], [0.75, -0.5])


def test_the_share_is_that_of_the_accepted_clients(toy):
    """Client 0's model is (1, 0), and client 1's is refused: h = 1/2 (1, 0)."""
    result = toy({NAME: {"alpha": 1.0, **UNIFORM}, RejectsClient1: {}})
    near(plugin_state(result, NAME)[f"h.{W}"], [0.5, 0.0])
    near(weights(result)[W], [1.5, 0.0])


@pytest.mark.parametrize(
    ("alpha", "linear", "weighting"),
    [(0.1, True, "uniform"), (1.0, True, "uniform"), (1.0, False, "uniform"), (0.1, True, "samples")],
)
def test_a_simulation_in_numpy(toy, alpha, linear, weighting):
    """Momentum, weight decay, lr decay, clients of different K, clients that sit rounds out."""
    w, s, own, h = np.zeros(2), np.zeros(2), np.zeros((3, 2)), np.zeros((3, 2))
    share = np.ones(3) if weighting == "uniform" else np.array(SIZES) / np.mean(SIZES)
    for number, cohort in enumerate(COHORTS):
        lr, trained = 0.02 * 0.7**number, {}
        for i in cohort:

            def gradient(v, i=i, w=w, s=s):
                return v - CENTRES[i] + alpha / share[i] * (v - w + h[i]) + linear * (s / share[i] - own[i])

            trained[i] = steps_by_hand(w, gradient, STEPS[i], lr=lr, momentum=0.5, weight_decay=0.1)
        for i, y in trained.items():
            h[i] = h[i] + y - w
            own[i] = linear * (own[i] - s / share[i] + (w - y) / (lr * distance_by_hand(STEPS[i], 0.5)))
        w, s = np.mean(list(trained.values()), axis=0) + h.mean(axis=0), (share[:, None] * own).mean(axis=0)
    options = {"alpha": alpha, "linear": linear, "weighting": weighting}
    plugins = {NAME: options, Cohorts: {"rounds": COHORTS}}
    result = toy(plugins, **SIMULATED)
    near(weights(result)[W], w, 1e-5)
    near(plugin_state(result, NAME)[f"h.{W}"], h.mean(axis=0))
    for i in range(3):
        near(plugin_state(result, NAME, i)[f"h.{W}"], h[i])
    assert (f"s.{W}" in plugin_state(result, NAME)) == (f"s.{W}" in plugin_state(result, NAME, 0)) == linear
    if linear:
        near(plugin_state(result, NAME)[f"s.{W}"], s, 5e-5)
        for i in range(3):
            near(plugin_state(result, NAME, i)[f"s.{W}"], own[i], 5e-5)


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_s_and_the_servers_drift_are_means_over_all_clients(go, participation):
    result = go({NAME: UNIFORM}, participation=participation, rounds=5, alpha=0.1)
    state = plugin_state(result, NAME)
    assert set(state) == {f"{kind}.{name}" for kind in "hs" for name, _ in result.model.named_parameters()}
    assert (len({tuple(line["cohort"]) for line in records(result)}) > 2) == (participation < 1)
    for name, mean in state.items():
        own = [plugin_state(result, NAME, i).get(name, torch.zeros(())).double() for i in range(4)]
        scale = float(mean.abs().max())
        assert scale > 0
        near(mean / scale, (sum(own) / 4 / scale).numpy(), 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_weighted_by_samples_it_ends_at_the_optimum_of_the_mean_over_samples(toy, alpha):
    options = {"rounds": 30, "lr": 0.2, "local_epochs": 5, "checkpoint_every": 30}
    near(weights(toy({NAME: {"alpha": alpha}}, **options))[W], [0.5, 3.0], 1e-4)
    near(weights(toy({NAME: {"alpha": alpha, **UNIFORM}}, **options))[W], [1.0, 2.0], 1e-4)


def one_round(state, *, clients, steps, lr, momentum, alpha, linear):
    """One round of clients with the losses w^2 / 2, by the package's equations: a linear map in float64."""
    w, s, h, own = state[0], state[1], list(state[2 : 2 + clients]), list(state[2 + clients :])
    trained = []
    for i in range(clients):
        target, gap = shifted_target(w, h[i]), linear * correction(w, s, own[i])
        y = w.numpy()
        y = steps_by_hand(
            y, lambda v, t=target, g=gap: v + alpha * (v - t.numpy()) + g.numpy(), steps, lr=lr, momentum=momentum
        )
        y = torch.from_numpy(np.asarray(y))
        trained.append(y)
        h[i] = renewed_displacement(h[i], w, y)
        own[i] = renewed_control(w, y, gap, lr=lr, steps=steps, momentum=momentum)
    mean_drift = torch.stack(h).mean()
    return torch.stack([displaced_mean(torch.stack(trained).mean(), mean_drift), torch.stack(own).mean(), *h, *own])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_the_drifts_share_out_among_themselves_is_never_undone(momentum):
    """The linearisation has the eigenvalue 1, N - 1 times: h_i of sum 0 that s_i make up for. The card says so."""
    federation = {"clients": 4, "steps": 20, "lr": 0.05, "momentum": momentum, "alpha": 0.1}
    columns = [one_round(unit, **federation, linear=1.0) for unit in torch.eye(10, dtype=torch.float64)]
    found = np.sort(np.abs(np.linalg.eigvals(torch.stack(columns, dim=1).numpy())))[::-1]
    np.testing.assert_allclose(found[:3], 1, atol=1e-9)
    assert found[3] < 0.999


def test_what_is_trained_but_does_not_move_is_corrected_all_the_same(toy):
    """In round 1 the rate is too small to change a bit of any y_i; only what is frozen stays as it is."""
    options = {NAME: {"alpha": 1.0, "linear": False}}
    one, two = (toy(options, lr_decay=1e-30, rounds=rounds) for rounds in (1, 2))
    assert plugin_state(one, NAME)[f"h.{W}"].abs().min() > 0
    assert torch.equal(weights(two)[W], weights(one)[W] + plugin_state(one, NAME)[f"h.{W}"].float())


class Constant(Plugin):
    """Local gradients -1 and 1 everywhere."""

    @hookimpl
    def task_loss(self, step):
        return step.logits.mean(dim=0).sum() * (2.0 * step.client.id - 1.0)


def test_s_i_is_one_gradient_with_momentum_too(go, monkeypatch):
    """The rule of SCAFFOLD: with K for A(K) s - s_i would alternate and grow (8.21, -50.97, ...)."""
    options = {**TOY, "local_epochs": 50, "rounds": 2, "lr": 0.001, "momentum": 0.9}

    def gap():
        result = go({Constant: {}, NAME: {"alpha": 1e-6, **UNIFORM}}, **options)
        return (plugin_state(result, NAME)[f"s.{W}"] - plugin_state(result, NAME, 0)[f"s.{W}"])[0].item()

    assert gap() == pytest.approx(1, rel=1e-3)
    monkeypatch.setattr("fedcore_functional.drift.effective_steps", lambda steps, momentum: float(steps))
    assert gap() == pytest.approx(-50.97, rel=5e-3)


# --- identities --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_without_its_linear_term_it_is_feddyn_to_the_bit(go, participation):
    pytest.importorskip("fedcore_feddyn")
    options = {"rounds": 4, "participation": participation}
    alone = go({NAME: {"alpha": 0.1, "linear": False}}, **options)
    feddyn = go({"feddyn": {"alpha": 0.1}}, **options)
    assert model_bytes(alone) == model_bytes(feddyn)
    assert model_bytes(go({NAME: {"alpha": 0.1}}, **options)) != model_bytes(feddyn)
    for i in range(4):
        for name, dual in client_state(feddyn, i)["feddyn"].items():
            assert torch.equal(plugin_state(alone, NAME, i)[f"h.{name}"], dual)


def test_the_local_problem_of_round_1_is_fedproxs(go):
    dc = records(go({NAME: {"alpha": 0.3, **UNIFORM}}, rounds=1))[0]["losses"]
    prox = records(go({"fedprox": {"mu": 0.3}, EqualWeights: {}}, rounds=1))[0]["losses"]
    assert dc == {"task": prox["task"], "feddc.drift": prox["fedprox.proximal"]}


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    runs = [go({NAME: options}, rounds=2) for options in ({}, {"alpha": 0.5}, {"linear": False}, UNIFORM)]
    assert len({model_bytes(run) for run in runs}) == 4
    assert set(records(runs[0])[1]["losses"]) == {"task", "feddc.drift", "feddc.gradient"}


def test_what_travels(go):
    result = go({NAME: UNIFORM}, rounds=3)
    size = 4 * sum(p.numel() for p in result.model.parameters())
    found = result.summary["bytes"]["by_plugin"][NAME]
    assert found == {"down": 2 * 4 * size, "up": 3 * 4 * size}, "s goes down from round 1 on, changes go up in each"
    assert NAME not in go({NAME: {"linear": False, **UNIFORM}}).summary["bytes"]["by_plugin"]
    found = go({NAME: {}}, rounds=3).summary["bytes"]["by_plugin"][NAME]
    assert found == {"down": 2 * 4 * size + 3 * 4 * 8, "up": 3 * 4 * size}, "and mean n, one number"


def test_with_fedprox(go):
    assert "fedprox.proximal" in records(go({NAME: {}, "fedprox": {"mu": 0.1}}))[1]["losses"]


# --- what is kept for each parameter ------------------------------------------------------------------------------


@pytest.mark.parametrize("check", STATE_CHECKS, ids=lambda check: check.__name__)
def test_what_is_kept_for_each_parameter(go, check):
    check(go, NAME, {"alpha": 1.0})


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        ExchangesClassifier,
        EqualWeights,
        StepsOnServer,
        OwnsClassifier,
    ],
)
def test_what_cannot_be_combined_is_refused(go, other):
    with raises(PluginConflictError):
        go({NAME: {}, other: {}})
