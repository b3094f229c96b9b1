"""q-FedAvg: the hand case, whole federations against NumPy, what q = 0 is, losses that a client makes up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore_qffl import bend, fair_weight, step_factor
from fedcore_testing import (
    EqualWeights,
    ExchangesClassifier,
    StepsOnServer,
    client_arrays,
    committed,
    federations,
    linear,
    model_bytes,
    records,
    softmax_by_hand,
    weights,
)
from tests.sentences import raises

UNEQUAL = {"clients": 3, "partition": "dirichlet", "alpha": 0.5, "samples": None}
FULL = {**UNEQUAL, "model": linear, "local_epochs": 2, "batch_size": 5000, "lr": 0.1, "weight_decay": 0.0}
go = federations(clients=3, samples=300)


# --- the equations -----------------------------------------------------------------------------------------------


def test_the_hand_case():
    """L 10, q 2, losses 3 and 1, |w_t - y|^2 0.5 / 100 and 4 / 100: h = 2*3*0.5 + 10*9 and 2*1*4 + 10*1."""
    losses, squares = (3.0, 1.0), (0.005, 0.04)
    bends = sum(bend(loss, square, 2.0) for loss, square in zip(losses, squares))
    weights_ = sum(fair_weight(loss, 2.0) for loss in losses)
    assert 100 * bends + 10 * weights_ == pytest.approx(93 + 18, rel=1e-9)
    assert step_factor(weights_, bends, 10.0) == pytest.approx(100 / 111, rel=1e-9)


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 5.0])
def test_h_bounds_the_curvature_of_a_quadratic(q):
    """F = 1/2 w^2 has L = 1; F^(q+1) / (q+1) has the second derivative q F^(q-1) w^2 + F^q."""
    for w in (0.1, 1.0, 3.0):
        loss = w * w / 2
        h = bend(loss, w * w, q) + fair_weight(loss, q)
        assert h == pytest.approx(q * loss ** (q - 1) * w * w + loss**q, rel=1e-6)


def test_a_loss_of_0_has_finite_weights():
    assert fair_weight(0.0, 0.5) < 1e-4
    assert np.isfinite(bend(0.0, 1.0, 0.01))


# --- a whole run -------------------------------------------------------------------------------------------------


def by_hand(result, start, q, lipschitz, uniform):
    """The whole federation in float64, the sums as Algorithm 2 prints them."""
    clients = client_arrays(result)
    w = {name: tensor.double().numpy() for name, tensor in start.items()}
    for _ in range(3):
        delta, h = dict.fromkeys(w, 0.0), 0.0
        for x, y in clients:
            count = 1.0 if uniform else len(x)
            loss = softmax_by_hand(w, x, y)[0] + 1e-10
            own = dict(w)
            for _ in range(2):
                gradient = softmax_by_hand(own, x, y)[1]
                own = {name: own[name] - 0.1 * gradient[name] for name in own}
            moved = {name: lipschitz * (w[name] - own[name]) for name in w}
            square = sum((d**2).sum() for d in moved.values())
            delta = {name: delta[name] + count * loss**q * d for name, d in moved.items()}
            h += count * (q * loss ** (q - 1) * square + lipschitz * loss**q)
        w = {name: w[name] - delta[name] / h for name in w}
    return w


@pytest.mark.parametrize(
    ("q", "change", "lipschitz", "weighting"),
    [
        (1.0, {}, 1 / (2 * 0.1), "samples"),
        (0.3, {"lipschitz": 4.0}, 4.0, "uniform"),
        (5.0, {"step": "rate"}, 1 / 0.1, "uniform"),
    ],
)
def test_a_run_is_the_method_in_numpy(go, q, change, lipschitz, weighting):
    result = go({"qffl": {"q": q, "weighting": weighting, **change}}, **FULL, momentum=0.0, rounds=3)
    start = weights(go({}, **{**FULL, "lr": 1e-30}, rounds=1))
    expected = by_hand(result, start, q, lipschitz, weighting == "uniform")
    other = by_hand(result, start, q, lipschitz, weighting != "uniform")
    far = 0.0
    for name, value in expected.items():
        np.testing.assert_allclose(weights(result)[name], value, rtol=1e-4, atol=1e-5)
        far = max(far, np.abs(other[name] - value).max())
    assert far > 1e-3


def test_one_local_step_without_momentum_makes_both_readings_of_L_one(go):
    one = {**UNEQUAL, "local_steps": 1, "momentum": 0.0}
    work, rate = (weights(go({"qffl": {"step": step}}, **one)) for step in ("work", "rate"))
    for name, tensor in work.items():
        torch.testing.assert_close(rate[name], tensor, rtol=1e-6, atol=1e-7)


def test_q_0_uniform_is_the_plain_mean_to_the_bit(go):
    fair = go({"qffl": {"q": 0.0, "weighting": "uniform"}}, **UNEQUAL)
    assert model_bytes(fair) == model_bytes(go(EqualWeights, **UNEQUAL))


def test_a_tiny_q_is_near_fedavg(go):
    """The limit that the paper states, seen in a run."""
    fedavg = weights(go({}, **UNEQUAL, rounds=1))
    far = [
        max((tensor - fedavg[name]).abs().max().item() for name, tensor in weights(run).items())
        for run in (go({"qffl": {"q": q}}, **UNEQUAL, rounds=1) for q in (1e-6, 1e-2))
    ]
    assert far[0] < 1e-5 < far[1]


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"q": 0.1}, {"lipschitz": 3.0}, {"step": "rate"}, {"weighting": "uniform"}, {"q": 0.0}]
    assert len({model_bytes(go({"qffl": change}, **UNEQUAL)) for change in changes}) == len(changes)


def test_a_loss_costs_8_bytes_and_a_rounds_sums_end_with_it(go):
    result, plain = go({"qffl": {}}, **UNEQUAL), go({}, **UNEQUAL)
    fair, fedavg = (records(run)[0]["bytes"]["by_plugin"] for run in (result, plain))
    assert fair == {**fedavg, "qffl": {"down": 0, "up": 3 * 8}}
    assert committed(result).plugins.get("qffl", {}) == {}, "a round's sums end with it"


class Lies(Plugin):
    """Client 1 sends a loss of its own making."""

    sent = 0.0

    @hookimpl
    def guard_upload(self, client, update):
        if client.id != 1:
            return None
        loss = torch.tensor(Lies.sent, dtype=torch.float64)
        return replace(update, payload={**update.payload, "qffl": {"loss": loss}})


def test_a_negative_loss_counts_as_0(go):
    """As local differential privacy's noise may make it."""
    found = []
    for sent in (0.0, -1.0):
        Lies.sent = sent
        found.append(model_bytes(go({"qffl": {}, Lies: {}}, **UNEQUAL, rounds=1)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "other",
    [
        StepsOnServer,
        ExchangesClassifier,
        EqualWeights,
    ],
)
def test_refused_beside_others_with_the_reason(go, other):
    with raises(PluginConflictError):
        go({"qffl": {}, other: {}})
