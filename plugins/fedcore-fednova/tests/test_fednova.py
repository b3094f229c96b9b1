"""FedNova: local work by hand and by brute force, the round loop against NumPy, what equal work means, company."""

from __future__ import annotations

import doctest
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
import fedcore_fednova
from fedcore import Loss, Plugin, RunConfig, SplitModel, hookimpl
from fedcore.data import Dataset, ResidentSamples
from fedcore.errors import FedcoreError, PluginConflictError
from fedcore.functional import effective_steps, proximal_term
from fedcore.local import train_batch
from fedcore.rundir import RunDirectory
from fedcore.serial import read_tensors
from fedcore.testing import forbid_host_sync
from fedcore_fednova import FedNovaOptions, local_norm, normalised_step, step_factor
from fedcore_fednova import equations as eq

HERE = f"module:{__name__}."
DIGITS = {"workers": 0, "device": "cpu", "clients": 4, "rounds": 2, "local_epochs": 1, "batch_size": 64}
W = "encoder.base.w"


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def run(plugins, notify=None, **options):
        config = RunConfig(**{**DIGITS, **options}, plugins=plugins, out=tempfile.mkdtemp(dir=root))
        return fedcore.run(config, notify=notify)

    return run


def bytes_of(result) -> bytes:
    return (result.directory / "model.safetensors").read_bytes()


def weights(result):
    return read_tensors(result.directory / "model.safetensors")[0]


def lines(result):
    return RunDirectory(result.directory).read_metrics()


def state_of(result):
    return RunDirectory(result.directory).checkpoints.load().plugins.get("fednova", {})


# --- a problem for a hand: f_i = |w - c_i|^2 / 2, K_i = samples of client i * epochs ------------------------------


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.w.expand(len(x), -1)


class PointModel(SplitModel):
    def make_classifier(self, feature_dim):
        return nn.Identity()


class Quadratic(Plugin):
    @hookimpl
    def task_loss(self, step):
        return 0.5 * (step.logits - step.x.flatten(1)).square().sum(dim=1).mean()


def origin(num_classes, input_shape):
    return PointModel(Point(), 2, 2)


def _dataset(points):
    images = torch.tensor(points, dtype=torch.float32).view(len(points), 1, 1, 2)
    samples = ResidentSamples(images, torch.tensor([i % 2 for i in range(len(points))]), [0.0], [1.0])
    return Dataset("centres", samples, samples, num_classes=2, input_shape=(1, 1, 2))


def two_and_one(data_dir=None):
    return _dataset([[2, 0], [2, 0], [0, 4]])


def all_but_last(labels, num_clients, **_):
    return [np.arange(len(labels) - 1), np.array([len(labels) - 1])]


CENTRES = np.array([[2.0, 0.0], [0.0, 4.0], [-3.0, 1.0], [1.0, -2.0]])
SIZES = [1, 2, 3, 5]


def four_clients(data_dir=None):
    return _dataset(np.repeat(CENTRES, SIZES, axis=0).tolist())


def by_size(labels, num_clients, **_):
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


class OneAndThree(Plugin):
    """Counts client 0 as one sample and client 1 as three."""

    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, samples={0: 1, 1: 3}[update.client])


TOY = {
    "dataset": HERE + "two_and_one",
    "model": HERE + "origin",
    "partition": HERE + "all_but_last",
    "clients": 2,
    "rounds": 1,
    "batch_size": 1,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
}
FOUR = {**TOY, "dataset": HERE + "four_clients", "partition": HERE + "by_size", "clients": 4}


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


def test_doctests():
    assert doctest.testmod(eq) == (0, 3)


# --- in the round loop -------------------------------------------------------------------------------------------


def test_the_toy_by_hand(go):
    plugins = {HERE + "Quadratic": {}, HERE + "OneAndThree": {}}
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
    result = go({HERE + "Quadratic": {}, "fednova": options}, **{**FOUR, **run})
    cohorts = [line["cohort"] for line in lines(result)]
    assert len({tuple(c) for c in cohorts}) > 2
    expected = reference(cohorts, options, run)
    assert np.abs(expected).min() > 0.01
    np.testing.assert_allclose(weights(result)[W], expected, rtol=0, atol=2e-5)


def test_fednova_goes_where_fedavg_does_not_the_optimum_of_the_objective(go):
    options = {**FOUR, "rounds": 70, "local_epochs": 2, "lr": 0.01, "eval_every": 70, "checkpoint_every": 70}
    n = np.array(SIZES)
    optimum = (n[:, None] * CENTRES).sum(axis=0) / n.sum()
    shifted = (n[:, None] ** 2 * CENTRES).sum(axis=0) / (n**2).sum()  # weights p_i K_i: FedAvg's surrogate objective
    fedavg, fednova = (
        weights(go({HERE + "Quadratic": {}, **plugin}, **options))[W].numpy() for plugin in ({}, {"fednova": {}})
    )
    assert np.abs(fednova - optimum).max() < 0.05
    assert np.abs(fedavg - shifted).max() < 0.05
    assert np.abs(fedavg - optimum).max() > 0.5


def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"mu": 0.5}, {"gmf": 0.5}, {"tau_eff": "steps"}, {"mu": 0.5, "tau_eff": "steps"}]
    found = [bytes_of(go({"fednova": change})) for change in changes]
    assert len(set(found)) == len(found)
    assert bytes_of(go({"fednova": {}})) == found[0], "twice the same bits"
    assert bytes_of(go({})) not in found


def test_a_server_momentum_of_0_keeps_nothing(go):
    assert state_of(go({"fednova": {}})) == {}
    kept = state_of(go({"fednova": {"gmf": 0.5}}))
    assert kept
    assert all(name.startswith("momentum.") for name in kept)


def test_the_first_round_has_no_server_momentum(go):
    assert bytes_of(go({"fednova": {"gmf": 0.9}}, rounds=1)) == bytes_of(go({"fednova": {}}, rounds=1))


def test_the_proximal_term_is_logged_apart_from_the_task(go):
    assert set(lines(go({"fednova": {"mu": 0.5}}))[1]["losses"]) == {"task", "fednova.proximal"}
    assert set(lines(go({"fednova": {}}))[1]["losses"]) == {"task"}


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
    options = {"partition": HERE + "even", "participation": 0.75, "local_epochs": 2, "momentum": momentum}
    fedavg, fednova = go({}, **options), go({"fednova": {}}, **options)
    assert bytes_of(fednova) == bytes_of(fedavg)
    assert [line["losses"] for line in lines(fednova)] == [line["losses"] for line in lines(fedavg)]


def test_equal_steps_with_a_proximal_term_are_fedprox_to_the_bit(go):
    options = {"partition": HERE + "even", "participation": 0.75, "local_epochs": 2}
    assert bytes_of(go({"fednova": {"mu": 0.3}}, **options)) == bytes_of(go({HERE + "Twin": {}}, **options))


def test_one_client_is_fedavg_to_the_bit(go):
    assert bytes_of(go({"fednova": {}}, clients=1)) == bytes_of(go({}, clients=1))


def with_buffers(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(base, 16, num_classes)


def one_over(labels, num_clients, **_):
    """Deal 65 samples to client 0 and 64 to the others: its second batch holds one, which BatchNorm skips."""
    return np.split(np.arange(65 + 64 * 3), [65, 129, 193])


def test_steps_that_were_not_taken_do_not_count(go):
    options = {"model": HERE + "with_buffers", "partition": HERE + "one_over"}
    assert bytes_of(go({"fednova": {}}, **options)) == bytes_of(go({}, **options))
    plain = {"partition": HERE + "one_over"}
    assert bytes_of(go({"fednova": {}}, **plain)) != bytes_of(go({}, **plain)), "without BatchNorm it is a step"


@pytest.mark.parametrize("options", [{}, {"tau_eff": "steps", "gmf": 0.5}], ids=str)
def test_buffers_are_averaged_as_fedavg_does(go, options):
    run = {"model": HERE + "with_buffers", "rounds": 1, "local_epochs": 2}
    fedavg, fednova = weights(go({}, **run)), weights(go({"fednova": options}, **run))
    buffers = [name for name in fedavg if "running" in name or "tracked" in name]
    assert len(buffers) == 3
    assert all(torch.equal(fednova[name], fedavg[name]) for name in buffers)
    assert not any(torch.equal(fednova[name], fedavg[name]) for name in set(fedavg) - set(buffers))


# --- traps -------------------------------------------------------------------------------------------------------


def single(labels, num_clients, **_):
    order = np.random.default_rng(0).permutation(len(labels))
    return [order[:1], *np.array_split(order[1:], num_clients - 1)]


@pytest.mark.parametrize("model", ["auto", HERE + "with_buffers"])
def test_a_client_of_one_sample(go, model):
    result = go({"fednova": {"gmf": 0.5}}, partition=HERE + "single", model=model)
    accepted = 4 if model == "auto" else 3  # BatchNorm cannot train on it: no steps, left out
    assert [line["accepted"] for line in lines(result)] == [accepted] * 2
    assert all(torch.isfinite(tensor).all() for tensor in weights(result).values())


class Everything(Plugin):
    @hookimpl
    def personal_parameters(self, model):
        return ["*"]


class Head(Plugin):
    @hookimpl
    def personal_parameters(self, model):
        return ["classifier.*"]


@pytest.mark.parametrize("keeper", ["Everything", "Head"])
def test_what_stays_on_the_clients_has_no_step(go, keeper):
    result = go({"fednova": {"gmf": 0.5}, HERE + keeper: {}})
    kept = state_of(result)
    assert not any("classifier" in name for name in kept)
    assert bool(kept) == (keeper == "Head")


def test_a_rejected_client_leaves_no_trace(go):
    """Client 3, the largest and thus first in dispatch order, is refused: as if it were not there."""
    plugins = {HERE + "Quadratic": {}, HERE + "Refuse": {}, "fednova": {}}
    result = go(plugins, **{**FOUR, "local_epochs": 2, "lr": 0.1})
    expected = reference([[2, 1, 0]], {}, {"lr": 0.1, "local_epochs": 2, "momentum": 0.0, "weight_decay": 0.0})
    np.testing.assert_allclose(weights(result)[W], expected, rtol=0, atol=1e-6)


class Refuse(Plugin):
    @hookimpl
    def pre_aggregate(self, update):
        if update.client == 3:
            raise fedcore.RejectUpdate("not this one")


def test_a_step_neither_waits_for_the_device_nor_looks_at_more_than_it_needs(go, monkeypatch):
    seen = []

    def watching(*arguments):
        with forbid_host_sync():
            batch = train_batch(*arguments)
        seen.append(set(batch.depends_on))
        return batch

    monkeypatch.setattr("fedcore.local.train_batch", watching)
    go({"fednova": {"mu": 0.5}}, rounds=1)
    assert seen
    assert not set().union(*seen)


# --- stops and kills ---------------------------------------------------------------------------------------------

LONG = {"rounds": 4, "participation": 0.75}
SCRIPT = """
import os, signal, sys, fedcore
def kill(event, details):
    if event == "round" and details["round"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
config = fedcore.RunConfig(plugins={{"fednova": {options}}}, out=sys.argv[1], **{run})
fedcore.run(config, notify=kill)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_momentum(go, tmp_path):
    options = {"gmf": 0.8}
    script = SCRIPT.format(options=options, run={**DIGITS, **LONG})
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], env=os.environ, timeout=120)
    assert done.returncode == -signal.SIGKILL
    resumed, straight = fedcore.resume(tmp_path / "run", allow_code=True), go({"fednova": options}, **LONG)
    assert bytes_of(resumed) == bytes_of(straight)
    one, other = state_of(resumed), state_of(straight)
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("at", [0, 2])
def test_an_interrupted_run_goes_on_with_its_momentum(go, at):
    def stop(event, details):
        if event == "round" and details["round"] == at:
            raise KeyboardInterrupt

    with pytest.raises(FedcoreError, match="interrupted") as interruption:
        go({"fednova": {"gmf": 0.8}}, notify=stop, **LONG)
    directory = Path(re.search(r"resume (\S+)", str(interruption.value)).group(1))
    assert bytes_of(fedcore.resume(directory, allow_code=True)) == bytes_of(go({"fednova": {"gmf": 0.8}}, **LONG))


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"mu": -0.1}, {"mu": float("nan")}, {"gmf": 1.0}, {"gmf": -0.1}, {"tau_eff": "mean"}, {"beta": 0.5}],
    ids=str,
)
def test_options_out_of_bounds_are_refused(go, options):
    with pytest.raises((FedcoreError, ValueError), match=next(iter(options))):
        go({"fednova": options})


class Owner(Plugin):
    owns = ("classifier.*",)


class Optimizer(Plugin):
    server_optimizer = True


class Weigher(Plugin):
    @hookimpl
    def weight(self, update):
        return 1.0


class Exchanger(Plugin):
    exchanges = ("classifier.*",)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("Owner", "owns the aggregation"),
        ("Optimizer", "both are server optimizers"),
        ("Weigher", "both implement weight"),
        ("Exchanger", "exchanges"),
    ],
)
def test_refused_beside_others_with_both_names_and_the_reason(go, other, reason, order):
    names = ["fednova", HERE + other][::order]
    with pytest.raises(PluginConflictError, match=reason) as refusal:
        go({name: {} for name in names})
    assert "'fednova'" in str(refusal.value)
    assert repr(other.lower()) in str(refusal.value)


def test_refused_beside_fedcd(go):
    pytest.importorskip("fedcore_fedcd")
    with pytest.raises(PluginConflictError, match=r"'fednova' and 'fedcd' cannot be combined.*owns the aggregation"):
        go({"fedcd": {}, "fednova": {}})


def test_beside_a_local_term(go):
    result = go({HERE + "Twin": {}, "fednova": {}})
    assert set(lines(result)[1]["losses"]) == {"task", "twin"}
    assert [line["accepted"] for line in lines(result)] == [4, 4]


def test_the_readme_names_every_option_with_its_default():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name, field in FedNovaOptions.model_fields.items():
        assert f"| `{name}` | `{field.default}` |" in text
    assert set(fedcore_fednova.__all__) >= {"FedNova", "FedNovaOptions"}
