"""FedNova: local work by hand and by brute force, the round loop against NumPy, what equal work means, company."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedcore
from fedcore import Loss, Plugin, PluginConflictError, hookimpl
from fedcore_fednova import local_norm, normalised_step, step_factor
from fedcore_functional import effective_steps, proximal_term
from fedcore_testing import (
    EqualWeights,
    ExchangesClassifier,
    FrozenEncoder,
    OwnsClassifier,
    PersonalClassifier,
    Quadratic,
    StepsOnServer,
    W,
    analytic_federation,
    federations,
    interrupted,
    model_bytes,
    plugin_state,
    records,
    steps_without_host_sync,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

DIGITS = {"clients": 4}
LONG = {**DIGITS, "rounds": 4, "participation": 0.75}
CENTRES, SIZES = np.array([[2.0, 0.0], [0.0, 4.0], [-3.0, 1.0], [1.0, -2.0]]), (1, 2, 3, 5)
STEPWISE = {"rounds": 1, "batch_size": 1, "lr": 0.5}  # a client takes as many steps as it has samples, per epoch
TOY = {**analytic_federation([[2.0, 0.0], [0.0, 4.0]], [2, 1]), **STEPWISE}
FOUR = {**analytic_federation(CENTRES, SIZES), **STEPWISE}
go = federations(**DIGITS)


class OneAndThree(Plugin):
    """Counts client 0 as one sample and client 1 as three."""

    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, samples={0: 1, 1: 3}[update.client])


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "momentum", "shrinkage", "norm"),
    [(3, 0.9, 0.0, 5.61), (2, 0.0, 0.5, 1.5), (7, 0.0, 0.0, 7.0), (1, 0.9, 0.5, 1.0), (0, 0.9, 0.0, 0.0)],
)
def test_local_work_by_hand(steps, momentum, shrinkage, norm):
    assert local_norm(steps, momentum, shrinkage) == pytest.approx(norm, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 1.3])
def test_local_work_is_the_displacement_by_each_steps_gradient(steps, momentum, shrinkage):
    """Brute force: PyTorch's SGD, once per step j, with gradient 1 at step j and 0 elsewhere."""
    coefficients = []
    for impulse in range(steps):
        w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=momentum)
        for step in range(steps):
            w.grad = (shrinkage / 0.1) * w.detach() + float(step == impulse)
            optimizer.step()
        coefficients.append(-w.item() / 0.1)
    assert local_norm(steps, momentum, shrinkage) == pytest.approx(np.abs(coefficients).sum(), rel=1e-12)
    assert coefficients[-1] == pytest.approx(1.0)
    assert shrinkage < 1 or steps < 3 or min(coefficients) < 0, "both signs"


@pytest.mark.parametrize("steps", [1, 40])
def test_special_cases_of_local_work(steps):
    assert local_norm(steps, 0.9) == pytest.approx(effective_steps(steps, 0.9), rel=1e-12)
    assert local_norm(steps, 0.0, 0.01) == pytest.approx((1 - 0.99**steps) / 0.01, rel=1e-12)
    assert local_norm(steps) == steps


def test_the_servers_step_against_the_definition():
    rng = np.random.default_rng(0)
    w, y, n, a = rng.normal(size=(3, 2)), rng.normal(size=(4, 3, 2)), np.array([1, 2, 30, 4]), np.array([1, 5.6, 3, 9])
    p = n / n.sum()
    expected = w - (p @ a) * sum(p_i * (w - y_i) / a_i for p_i, y_i, a_i in zip(p, y, a))
    mean = np.average(y, axis=0, weights=n / a)
    for unit in (1.0, 5.6):  # a common unit of work cancels
        factor = step_factor(n.sum(), (n * a / unit).sum(), (n * unit / a).sum())
        got = normalised_step(torch.tensor(w), torch.tensor(mean), factor)
        np.testing.assert_allclose(got, expected, rtol=1e-12)


# --- in the round loop -------------------------------------------------------------------------------------------


def test_the_toy_by_hand(go):
    plugins = {Quadratic: {}, OneAndThree: {}}
    assert weights(go(plugins, **TOY))[W].tolist() == [0.375, 1.5]
    torch.testing.assert_close(
        weights(go({**plugins, "fednova": {}}, **TOY))[W], torch.tensor([0.234375, 1.875]), rtol=0, atol=1e-7
    )


def reference(cohorts, options, run):
    """The whole federation in float64, the definition of FedNova term by term."""
    w, velocity = np.zeros(2), np.zeros(2)
    for number, cohort in enumerate(cohorts):
        lr = run["lr"] * run.get("lr_decay", 1.0) ** number
        n = np.array([SIZES[i] for i in cohort], dtype=float)
        steps = [SIZES[i] * run["local_epochs"] for i in cohort]
        d, a = [], []
        for client, K in zip(cohort, steps):
            y, v = w.copy(), np.zeros(2)
            response = np.zeros((K, K + 1))  # of an impulse at step j, by brute force
            speed = np.zeros(K)
            for k in range(K):
                pull = options.get("mu", 0.0)
                v = run["momentum"] * v + (y - CENTRES[client]) + pull * (y - w) + run["weight_decay"] * y
                y = y - lr * v
                speed = run["momentum"] * speed - lr * pull * response[:, k] + (np.arange(K) == k)
                response[:, k + 1] = response[:, k] + speed
            a.append(np.abs(response[:, K]).sum())
            d.append((w - y) / a[-1])
        p = n / n.sum()
        tau = p @ (steps if options.get("tau_eff") == "steps" else a)
        step = tau * sum(p_i * d_i for p_i, d_i in zip(p, d))
        velocity = options.get("gmf", 0.0) * velocity + step / lr
        w = w - lr * velocity
    return w


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gmf": 0.7},
        {"mu": 0.8},
        {"mu": 0.8, "tau_eff": "steps"},
        {"tau_eff": "steps"},
        {"mu": 0.5, "gmf": 0.5},
        {"gmf": 0.99, "tau_eff": "steps"},
    ],
    ids=str,
)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_whole_federation_against_numpy(go, options, momentum):
    run = {
        "rounds": 6,
        "local_epochs": 2,
        "lr": 0.1,
        "lr_decay": 0.8,
        "momentum": momentum,
        "weight_decay": 0.03,
        "participation": 0.5,
    }
    result = go({Quadratic: {}, "fednova": options}, **{**FOUR, **run})
    cohorts = [line["cohort"] for line in records(result)]
    assert len({tuple(c) for c in cohorts}) > 2
    expected = reference(cohorts, options, run)
    assert np.abs(expected).min() > 0.01
    np.testing.assert_allclose(weights(result)[W], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_fednova_goes_where_fedavg_does_not_the_optimum_of_the_objective(go):
    options = {**FOUR, "rounds": 70, "local_epochs": 2, "lr": 0.01, "eval_every": 70, "checkpoint_every": 70}
    n = np.array(SIZES)
    optimum = (n[:, None] * CENTRES).sum(axis=0) / n.sum()
    shifted = (n[:, None] ** 2 * CENTRES).sum(axis=0) / (n**2).sum()  # weights p_i K_i: FedAvg's surrogate objective
    fedavg, fednova = (weights(go({Quadratic: {}, **plugin}, **options))[W].numpy() for plugin in ({}, {"fednova": {}}))
    assert np.abs(fednova - optimum).max() < 0.05
    assert np.abs(fedavg - shifted).max() < 0.05
    assert np.abs(fedavg - optimum).max() > 0.5


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"mu": 0.5}, {"gmf": 0.5}, {"tau_eff": "steps"}, {"mu": 0.5, "tau_eff": "steps"}]
    found = [model_bytes(go({"fednova": change})) for change in changes]
    assert len(set(found)) == len(found)
    assert model_bytes(go({})) not in found


def test_a_server_momentum_of_0_keeps_nothing(go):
    assert plugin_state(go({"fednova": {}}), "fednova") == {}
    kept = plugin_state(go({"fednova": {"gmf": 0.5}}), "fednova")
    assert kept
    assert all(name.startswith("momentum.") for name in kept)


def test_the_momentum_does_not_move_a_frozen_layer(go):
    """The encoder is frozen from round 1 on; the momentum remembers round 0."""
    first, third = (
        weights(go({"fednova": {"gmf": 0.9}, FrozenEncoder: {}}, rounds=rounds, participation=1.0)) for rounds in (1, 3)
    )
    assert all(torch.equal(first[name], third[name]) for name in first if name.startswith("encoder."))
    assert not torch.equal(first["classifier.weight"], third["classifier.weight"])


def test_the_first_round_has_no_server_momentum(go):
    assert model_bytes(go({"fednova": {"gmf": 0.9}}, rounds=1)) == model_bytes(go({"fednova": {}}, rounds=1))


def test_the_proximal_term_is_logged_apart_from_the_task(go):
    assert set(records(go({"fednova": {"mu": 0.5}}))[1]["losses"]) == {"task", "fednova.proximal"}
    assert set(records(go({"fednova": {}}))[1]["losses"]) == {"task"}


# --- equal work --------------------------------------------------------------------------------------------------


class Twin(Plugin):
    """FedProx, without FedNova's server."""

    @hookimpl
    def local_loss(self, step):
        return Loss(proximal_term(step.parameters, step.reference), weight=0.3)


def even(labels, num_clients, **_):
    """Deal unequal numbers of samples, 70 to 100, that make two batches of 64 each."""
    return np.split(np.arange(340), [70, 150, 240])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_are_fedavg_to_the_bit(go, momentum):
    options = {"partition": even, "participation": 0.75, "local_epochs": 2, "momentum": momentum}
    fedavg, fednova = go({}, **options), go({"fednova": {}}, **options)
    assert model_bytes(fednova) == model_bytes(fedavg)
    assert [line["losses"] for line in records(fednova)] == [line["losses"] for line in records(fedavg)]


def test_equal_steps_with_a_proximal_term_are_fedprox_to_the_bit(go):
    options = {"partition": even, "participation": 0.75, "local_epochs": 2}
    assert model_bytes(go({"fednova": {"mu": 0.3}}, **options)) == model_bytes(go({Twin: {}}, **options))


def test_with_local_steps_it_is_fedavg_to_the_bit_and_a_note_says_so(go):
    options = {"local_steps": 3}
    with warns(RuntimeWarning, "fednova", "--local-steps", "--local-epochs"):
        result = go({"fednova": {}}, **options)
    assert model_bytes(result) == model_bytes(go({}, **options))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fednova", RuntimeWarning)
        go({"fednova": {}}, **options, system={"stragglers": 0.5})
        go({"fednova": {"gmf": 0.5}}, **options)


def test_one_client_is_fedavg_to_the_bit(go):
    assert model_bytes(go({"fednova": {}}, clients=1)) == model_bytes(go({}, clients=1))


def one_over(labels, num_clients, **_):
    """Deal 65 samples to client 0 and 64 to the others: its second batch holds one, which BatchNorm skips."""
    return np.split(np.arange(65 + 64 * 3), [65, 129, 193])


def test_steps_that_were_not_taken_do_not_count(go):
    options = {"model": with_batch_norm, "partition": one_over}
    assert model_bytes(go({"fednova": {}}, **options)) == model_bytes(go({}, **options))
    plain = {"partition": one_over}
    assert model_bytes(go({"fednova": {}}, **plain)) != model_bytes(go({}, **plain)), "without BatchNorm it is a step"


@pytest.mark.parametrize("options", [{}, {"tau_eff": "steps", "gmf": 0.5}], ids=str)
def test_buffers_are_averaged_as_fedavg_does(go, options):
    run = {"model": with_batch_norm, "rounds": 1, "local_epochs": 2}
    fedavg, fednova = weights(go({}, **run)), weights(go({"fednova": options}, **run))
    buffers = [name for name in fedavg if "running" in name or "tracked" in name]
    assert len(buffers) == 3
    assert all(torch.equal(fednova[name], fedavg[name]) for name in buffers)
    assert not any(torch.equal(fednova[name], fedavg[name]) for name in set(fedavg) - set(buffers))


# --- traps -------------------------------------------------------------------------------------------------------


def test_what_stays_on_the_clients_has_no_step(go):
    kept = plugin_state(go({"fednova": {"gmf": 0.5}, PersonalClassifier: {}}), "fednova")
    assert kept
    assert not any("classifier" in name for name in kept)


def test_a_rejected_client_leaves_no_trace(go):
    """Client 3, the largest and thus first in dispatch order, is refused: as if it were not there."""
    plugins = {Quadratic: {}, Refuse: {}, "fednova": {}}
    result = go(plugins, **{**FOUR, "local_epochs": 2, "lr": 0.1})
    expected = reference([[2, 1, 0]], {}, {"lr": 0.1, "local_epochs": 2, "momentum": 0.0, "weight_decay": 0.0})
    np.testing.assert_allclose(weights(result)[W], expected, rtol=0, atol=1e-6)


class Refuse(Plugin):
    @hookimpl
    def pre_aggregate(self, update):
        if update.client == 3:
            raise fedcore.RejectUpdate("not this one")


def test_a_step_neither_waits_for_the_device_nor_looks_at_more_than_it_needs(go):
    with steps_without_host_sync() as looked:
        go({"fednova": {"mu": 0.5}}, rounds=1)
    assert looked
    assert not set().union(*looked)


# --- stops ---------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_with_its_momentum(go, tmp_path):
    resumed = interrupted(tmp_path, ("fednova", {"gmf": 0.8}), after=2, **LONG)
    assert model_bytes(resumed) == model_bytes(go({"fednova": {"gmf": 0.8}}, **LONG))


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "other",
    [
        OwnsClassifier,
        StepsOnServer,
        EqualWeights,
        ExchangesClassifier,
    ],
)
def test_refused_beside_others_with_both_names_and_the_reason(go, other, order):
    names = ["fednova", other][::order]
    with raises(PluginConflictError, "'fednova'", repr(other.__name__.lower())):
        go({name: {} for name in names})


def test_beside_a_local_term(go):
    result = go({Twin: {}, "fednova": {}})
    assert set(records(result)[1]["losses"]) == {"task", "twin"}
    assert [line["accepted"] for line in records(result)] == [4, 4]
