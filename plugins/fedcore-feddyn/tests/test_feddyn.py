"""FedDyn: hand cases, an independent simulation in the paper's g and h, and what lasts over rounds of absence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore_feddyn import FedDyn, FedDynOptions, client_alpha
from fedcore_functional import shifted_target
from fedcore_testing import (
    Cohorts,
    EqualWeights,
    ExchangesClassifier,
    OwnsClassifier,
    RejectsClient1,
    StepsOnServer,
    W,
    federations,
    model_bytes,
    plugin_state,
    records,
    steps_by_hand,
    weights,
)
from fedcore_testing.drift import CENTRES, COHORTS, SIMULATED, SIZES, STATE_CHECKS, STEPS, near, toy_of
from tests.sentences import raises

NAME = "feddyn"
UNIFORM = {"weighting": "uniform"}
DIGITS = {"clients": 4, "eval_every": 99, "samples": 400}
go = federations(**DIGITS)


@pytest.fixture(scope="module")
def toy(go):
    return toy_of(go)


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 10.0])
def test_the_completed_square_has_the_papers_gradient(alpha):
    """Gradient of -<g, w> + alpha/2 |w - w_t|^2 is -g + alpha (w - w_t), g = -alpha lambda."""
    g = torch.Generator().manual_seed(1)
    w, w_t, dual = torch.randn(3, 5, dtype=torch.float64, generator=g)
    w = nn.Parameter(w)

    class Client:
        scratch = {"target": {w: shifted_target(w_t, dual)}, "alpha": alpha}

    class Step:
        parameters, client = [w], Client

    loss = FedDyn(FedDynOptions(alpha=alpha)).local_loss(Step)
    (loss.weight * loss.value).backward()
    gradient = -alpha * dual.numpy()
    expected = -gradient + alpha * (w.detach().numpy() - w_t.numpy())
    np.testing.assert_allclose(w.grad, expected, rtol=1e-12)
    assert (expected > 0).any()
    assert (expected < 0).any()
    assert [type(node).__name__ for node, _ in loss.value.grad_fn.next_functions if node] == ["AccumulateGrad"]


# --- in the round loop -------------------------------------------------------------------------------------------


def gradients(result, client, alpha=1.0):
    """g_i = -alpha lambda_i."""
    return -alpha * plugin_state(result, NAME, client)[W]


def test_the_hand_case(toy):
    one, two = (toy({NAME: {"alpha": 1.0, **UNIFORM}}, rounds=rounds) for rounds in (1, 2))
    near(weights(one)[W], [1.0, 2.0])
    near(-plugin_state(one, NAME)[W], [-0.5, -1.0])
    near(gradients(one, 0), [-1.0, 0.0])
    near(gradients(one, 1), [0.0, -2.0])
    near(weights(two)[W], [1.0, 2.0])
    near(-plugin_state(two, NAME)[W], [-0.25, -0.5])
    near(gradients(two, 0), [-1.0, 1.0])
    near(gradients(two, 1), [0.5, -2.0])


def test_the_share_is_that_of_the_accepted_clients(toy):
    """Client 0's model is (1, 0), and client 1's is refused: h = -1/2 (1, 0)."""
    result = toy({NAME: {"alpha": 1.0, **UNIFORM}, RejectsClient1: {}})
    near(-plugin_state(result, NAME)[W], [-0.5, 0.0])
    near(weights(result)[W], [1.5, 0.0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_it_ends_at_the_optimum_of_the_uniform_mean(toy, alpha):
    options = {"rounds": 40, "lr": 0.2, "local_epochs": 10, "checkpoint_every": 40}
    result = toy({NAME: {"alpha": alpha, **UNIFORM}}, **options)
    near(weights(result)[W], [1.0, 2.0], 1e-4)
    for i in range(2):  # and lambda_i holds the clients' gradients there
        near(gradients(result, i, alpha), np.array([1.0, 2.0]) - CENTRES[i], 1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_weighted_by_samples_it_ends_at_the_optimum_of_the_mean_over_samples(toy, alpha):
    """n = 1 and 3: (0.5, 3), with alpha_i lambda_i = -grad F_i, alpha_i = 2 alpha and 2/3 alpha."""
    options = {"rounds": 40, "lr": 0.2, "local_epochs": 10, "checkpoint_every": 40}
    result = toy({NAME: {"alpha": alpha}}, **options)
    near(weights(result)[W], [0.5, 3.0], 1e-4)
    for i in range(2):
        near(gradients(result, i, alpha * 2 / SIZES[i]), np.array([0.5, 3.0]) - CENTRES[i], 2e-3)


def test_a_solved_local_problem_leaves_the_gradient_at_its_solution(toy):
    """First-order condition: g_i = grad F_i(y_i) = y_i - centre_i; y_i lies halfway from w_0 = 0 to the centre."""
    result = toy({NAME: {"alpha": 1.0, **UNIFORM}}, local_epochs=60)
    for i in range(2):
        near(gradients(result, i), CENTRES[i] / 2 - CENTRES[i])


@pytest.mark.parametrize(("alpha", "weighting"), [(0.1, "uniform"), (1.0, "uniform"), (0.1, "samples")])
def test_a_simulation_in_numpy_with_the_papers_g_and_h(toy, alpha, weighting):
    """Momentum, weight decay, lr decay, clients of different K, clients that sit rounds out.

    Weighted by samples g_i is alpha_i / alpha times the gradient, and h stays the plain mean of all g_i.
    """
    w, h, g = np.zeros(2), np.zeros(2), np.zeros((3, 2))
    stiffness = alpha * (np.ones(3) if weighting == "uniform" else np.mean(SIZES) / np.array(SIZES))
    for number, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:

            def gradient(v, i=i, w=w):
                return v - CENTRES[i] - stiffness[i] / alpha * g[i] + stiffness[i] * (v - w)

            trained[i] = steps_by_hand(w, gradient, STEPS[i], lr=0.02 * 0.7**number, momentum=0.5, weight_decay=0.1)
        for i, y in trained.items():
            g[i] = g[i] - alpha * (y - w)
        h = h - alpha * sum(y - w for y in trained.values()) / 3
        w = np.mean(list(trained.values()), axis=0) - h / alpha
    result = toy({NAME: {"alpha": alpha, "weighting": weighting}, Cohorts: {"rounds": COHORTS}}, **SIMULATED)
    near(weights(result)[W], w, 1e-5)
    near(-alpha * plugin_state(result, NAME)[W], h)
    for i in range(3):
        near(gradients(result, i, alpha), g[i])
    assert np.abs(h).max() > 0.01


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_the_servers_state_is_the_mean_of_all_clients(go, participation):
    result = go({NAME: {}}, participation=participation, rounds=5, alpha=0.1)
    state = plugin_state(result, NAME)
    assert set(state) == {name for name, _ in result.model.named_parameters()}
    assert (len({tuple(line["cohort"]) for line in records(result)}) > 2) == (participation < 1)
    for name, mean_dual in state.items():
        own = [plugin_state(result, NAME, i).get(name, torch.zeros(())).double() for i in range(4)]
        scale = float(mean_dual.abs().max())
        assert scale > 0
        near(mean_dual / scale, (sum(own) / 4 / scale).numpy(), 1e-5)


# --- identities --------------------------------------------------------------------------------------------------


def test_the_local_problem_of_round_1_is_fedproxs(go):
    """mu = alpha, to the bit; the server then adds the mean displacement once more."""
    dyn = go({NAME: {"alpha": 0.3, **UNIFORM}}, rounds=1)
    prox = go({"fedprox": {"mu": 0.3}, EqualWeights: {}}, rounds=1)
    ours, theirs = records(dyn)[0]["losses"], records(prox)[0]["losses"]
    assert ours["task"] == theirs["task"]
    assert ours["feddyn.dynamic"] == theirs["fedprox.proximal"] > 0
    for name, mean in weights(prox).items():
        torch.testing.assert_close(weights(dyn)[name] - plugin_state(dyn, NAME)[name].float(), mean)


def test_alpha_changes_the_trajectory_and_a_larger_one_holds_the_client_nearer(go):
    runs = [go({NAME: {"alpha": alpha}}, rounds=1, samples=None) for alpha in (0.01, 1.0, 10.0)]
    distances = [records(run)[0]["losses"]["feddyn.dynamic"] for run in runs]
    assert distances[0] > distances[1] > distances[2] > 0
    assert len({model_bytes(run) for run in runs}) == 3


def test_clients_of_equal_size_count_the_same_to_the_bit(go):
    runs = [go({NAME: {"weighting": w}}, partition=quarters) for w in ("samples", "uniform")]
    assert model_bytes(runs[0]) == model_bytes(runs[1])
    unequal = [go({NAME: {"weighting": w}}, alpha=0.1) for w in ("samples", "uniform")]
    assert model_bytes(unequal[0]) != model_bytes(unequal[1])


def quarters(labels, num_clients, **_):
    return np.arange(4 * 100).reshape(4, 100)


def test_the_alpha_of_a_client():
    assert client_alpha(0.3, 5, None) == 0.3
    assert client_alpha(0.3, 5, 10.0) == pytest.approx(0.6)
    assert client_alpha(0.3, 40, 10.0) == pytest.approx(0.075)


def test_a_tiny_alpha_divides_nothing(go):
    assert all(t.isfinite().all() for t in weights(go({NAME: {"alpha": 1e-38}}, rounds=3)).values())


def test_what_travels(go):
    assert NAME not in go({NAME: UNIFORM}).summary["bytes"]["by_plugin"], "the model alone"
    found = go({NAME: {}}, rounds=3).summary["bytes"]["by_plugin"][NAME]
    assert found == {"down": 3 * 4 * 8, "up": 0}, "one number, to every client"


class FirstFreezesTheEncoder(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.id == 0:
            client.freeze(["encoder.*"])


def test_what_some_clients_freeze_is_corrected(go):
    """Only what all of them freeze is left out."""
    result = go({NAME: {}, FirstFreezesTheEncoder: {}}, rounds=1)
    assert set(plugin_state(result, NAME)) == set(weights(result))


def test_what_is_trained_but_does_not_move_is_corrected_all_the_same(toy):
    """In round 1 the rate is too small to change a bit of any y_i; only what is frozen stays as it is."""
    one, two = (toy({NAME: {"alpha": 1.0}}, lr_decay=1e-30, rounds=rounds) for rounds in (1, 2))
    assert plugin_state(one, NAME)[W].abs().min() > 0
    assert torch.equal(weights(two)[W], weights(one)[W] + plugin_state(one, NAME)[W].float())


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
