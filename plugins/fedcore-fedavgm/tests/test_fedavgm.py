"""FedAvgM: the hand cases of its three variants, the round loop against NumPy, what momentum leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedcore
from fedcore import Plugin, PluginConflictError, RoundFailedError, hookimpl
from fedcore_fedavgm import momentum_step
from fedcore_testing import (
    EqualWeights,
    FrozenEncoder,
    OwnsClassifier,
    PersonalClassifier,
    Quadratic,
    StepsOnServer,
    W,
    analytic_federation,
    federations,
    model_bytes,
    plugin_state,
    records,
    same_tensors,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

DIGITS = {"clients": 4, "samples": 400}
LONG = {**DIGITS, "rounds": 4, "participation": 0.75}
CENTRES, SIZES = np.array([[2.0, 0.0], [0.0, 4.0], [-3.0, 1.0], [1.0, -2.0]]), (1, 2, 3, 5)
TOY = {**analytic_federation(CENTRES, SIZES), "lr": 0.2}
VARIANTS = ["heavy-ball", "nesterov", "ema"]
go = federations(**DIGITS)


class Pull(Plugin):
    """Moves every client by +1 in round 0 and by +0.5 afterwards, at lr 1."""

    @hookimpl
    def task_loss(self, step):
        return -step.logits.mean(dim=0).sum() * (1.0 if step.round == 0 else 0.5)


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "first", "second"), [("heavy-ball", 1.0, 2.4), ("nesterov", 1.9, 3.66), ("ema", 0.1, 0.24)]
)
def test_the_hand_case_through_the_round_loop(go, variant, first, second):
    plugins = {Pull: {}, "fedavgm": {"beta": 0.9, "variant": variant}}
    for rounds, expected in ((1, first), (2, second)):
        result = go(plugins, **{**TOY, "lr": 1.0, "rounds": rounds})
        torch.testing.assert_close(weights(result)[W], torch.full((2,), expected), rtol=0, atol=1e-6)


def reference(cohorts, beta, lr_s, variant, lr, epochs):
    """The whole federation in float64, the variants in the form their sources have."""
    w, v = np.zeros(2), np.zeros(2)
    for cohort in cohorts:
        n = np.array([SIZES[i] for i in cohort], dtype=float)
        y = [CENTRES[i] + (w - CENTRES[i]) * (1 - lr) ** epochs for i in cohort]
        d = w - (n / n.sum()) @ np.array(y)
        v = beta * v + ((1 - beta) * d if variant == "ema" else d)
        w = w - lr_s * (d + beta * v if variant == "nesterov" else v)
    return w


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("beta", "lr"), [(0.9, 1.0), (0.5, 0.3), (0.0, 0.7), (0.99, 1.5)])
def test_the_whole_federation_against_numpy(go, variant, beta, lr):
    plugins = {Quadratic: {}, "fedavgm": {"beta": beta, "lr": lr, "variant": variant}}
    result = go(plugins, **{**TOY, "rounds": 7, "participation": 0.5, "local_epochs": 3})
    cohorts = [line["cohort"] for line in records(result)]
    assert len({tuple(c) for c in cohorts}) > 2
    expected = reference(cohorts, beta, lr, variant, 0.2, 3)
    np.testing.assert_allclose(weights(result)[W], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_goes_on_in_the_direction_of_the_past(variant):
    """Past and present at right angles: the present's share is d's own (or less), the past's positive."""
    past, d = torch.tensor([1.0, 0.0]), torch.tensor([0.0, -2.0])
    step, velocity = momentum_step(d, past, 0.5, variant)
    assert step[0] > 0
    assert step[1] < 0
    assert velocity[0] == 0.5
    assert past.tolist() == [1.0, 0.0], "not changed in place"
    assert d.tolist() == [0.0, -2.0]


def test_a_moving_average_is_a_heavy_ball_with_a_smaller_learning_rate(go):
    ema, ball = {"beta": 0.8, "lr": 2.0, "variant": "ema"}, {"beta": 0.8, "lr": 0.4}
    one, other = (
        weights(go({Quadratic: {}, "fedavgm": options}, **{**TOY, "rounds": 5}))[W] for options in (ema, ball)
    )
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- what is FedAvg ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fedavg(go):
    return go({}, rounds=3, participation=0.75)


def test_a_heavy_balls_first_round_is_fedavgs_to_the_bit(go):
    assert model_bytes(go({"fedavgm": {}}, rounds=1)) == model_bytes(go({}, rounds=1))


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go, fedavg):
    changes = [{}, {"beta": 0.5}, {"lr": 0.5}, {"variant": "nesterov"}, {"variant": "ema"}]
    found = [model_bytes(go({"fedavgm": change}, rounds=3, participation=0.75)) for change in changes]
    assert len({*found, model_bytes(fedavg)}) == len(changes) + 1


# --- what momentum leaves alone ----------------------------------------------------------------------------------


def test_buffers_are_fedavgs(go):
    """Round 1 is FedAvg's, so round 2 trains the same updates: parameters differ after it, buffers do not."""
    run = {"model": with_batch_norm, "rounds": 2}
    fedavg, result = weights(go({}, **run)), go({"fedavgm": {"beta": 0.97}}, **run)
    fedavgm = weights(result)
    buffers = [name for name in fedavg if "running" in name or "tracked" in name]
    assert len(buffers) == 3
    assert all(torch.equal(fedavgm[name], fedavg[name]) for name in buffers)
    assert not any(torch.equal(fedavgm[name], fedavg[name]) for name in set(fedavg) - set(buffers))
    assert set(plugin_state(result, "fedavgm")) == set(fedavg) - set(buffers)


@pytest.mark.slow
def test_the_running_variance_stays_positive(go):
    """Momentum on every tensor, as in MOON's code, would drive it below 0."""
    result = go({"fedavgm": {"beta": 0.97}}, model=with_batch_norm, rounds=12)
    assert (weights(result)["encoder.base.norm.running_var"] > 0).all()


def test_the_velocity_does_not_move_a_frozen_layer(go):
    """The encoder is frozen from round 1 on; the velocity remembers round 0."""
    first, third = (weights(go({"fedavgm": {}, FrozenEncoder: {}}, rounds=rounds)) for rounds in (1, 3))
    assert all(torch.equal(first[name], third[name]) for name in first if name.startswith("encoder."))
    assert not torch.equal(first["classifier.weight"], third["classifier.weight"])


def test_what_stays_on_the_clients_has_no_velocity(go):
    kept = plugin_state(go({"fedavgm": {}, PersonalClassifier: {}}), "fedavgm")
    assert kept
    assert not any(name.startswith("classifier.") for name in kept)


# --- stops, kills and failures -----------------------------------------------------------------------------------


class Fail(Plugin):
    """The model of one round breaks after the server's step, once."""

    broken = True

    @hookimpl
    def server_step(self, server, mean):
        if Fail.broken and server.round == 2:
            Fail.broken = False
            raise RoundFailedError("once")


def test_a_round_that_fails_leaves_the_velocity_alone(go, tmp_path):
    plugins = {"fedavgm": {}, Fail: {}}
    with pytest.raises(RoundFailedError):
        go(plugins, out=tmp_path / "run", **LONG)
    resumed, straight = fedcore.resume(tmp_path / "run", allow_code=True), go(plugins, **LONG)
    assert model_bytes(resumed) == model_bytes(straight)
    assert same_tensors(plugin_state(resumed, "fedavgm"), plugin_state(straight, "fedavgm"))


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("other", [OwnsClassifier, StepsOnServer])
def test_refused_beside_others_with_both_names_and_the_reason(go, other, order):
    names = ["fedavgm", other][::order]
    with raises(PluginConflictError, "'fedavgm'", repr(other.__name__.lower())):
        go({name: {} for name in names})


def test_beside_other_weights_of_the_mean(go):
    assert model_bytes(go({EqualWeights: {}, "fedavgm": {}})) != model_bytes(go({"fedavgm": {}}))
