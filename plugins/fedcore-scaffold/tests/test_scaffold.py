"""SCAFFOLD: hand cases, an independent simulation, the invariant c = mean c_i, and what the wrong divisor does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

import fedcore
import fedcore_scaffold.equations as eq
from fedcore import Plugin, PluginOptions, RunConfig, SplitModel, hookimpl
from fedcore.data import Dataset, ResidentSamples
from fedcore.errors import ConfigError, FedcoreError, PluginConflictError
from fedcore.local import train_batch
from fedcore.rundir import RunDirectory
from fedcore.serial import read_tensors
from fedcore.testing import forbid_host_sync
from fedcore_scaffold import Scaffold, ScaffoldOptions

NAME = "scaffold"
DIGITS = {
    "workers": 0,
    "device": "cpu",
    "clients": 4,
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 64,
    "eval_every": 99,
}
HERE = f"module:{__name__}."
W = "encoder.base.w"

# --- data and models small enough for a hand: a model that is its parameters, a sample that is its centre --------


def _samples(points):
    images = torch.tensor(points, dtype=torch.float32).view(len(points), 1, 1, -1)
    return ResidentSamples(images, torch.arange(len(points)) % 2, [0.0], [1.0])


def _dataset(points):
    return Dataset("toy", _samples(points), _samples([[0, 0]] * 4), num_classes=2, input_shape=(1, 1, 2))


def two_centres(data_dir=None):
    """TOY of baselines.md: n_1 = 1 at (2, 0), n_2 = 3 at (0, 4)."""
    return _dataset([[2, 0]] + [[0, 4]] * 3)


def three_centres(data_dir=None):
    return _dataset([[2, 0]] + [[0, 4]] * 3 + [[-1, 1]] * 2)


def by_centre(labels, num_clients, **_):
    return [np.arange(0, 1), np.arange(1, 4), np.arange(4, 6)][:num_clients]


def first_alone(labels, num_clients, **_):
    """Deal one sample to client 0, and no sample of class 0 to client 1."""
    rest = np.random.default_rng(0).permutation(len(labels) - 1) + 1
    others = np.array_split(rest, num_clients - 1)
    return [np.array([0]), others[0][labels[others[0]] != 0], *others[1:]]


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.w.expand(len(x), -1)


class PointModel(SplitModel):
    def make_classifier(self, feature_dim):
        return nn.Identity()


def at_origin(num_classes, input_shape):
    return PointModel(Point(), 2, 2)


def with_buffers(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(base, 16, num_classes)


class Quadratic(Plugin):
    """f_i(w) = |w - centre_i|^2 / 2."""

    @hookimpl
    def task_loss(self, step):
        return 0.5 * (step.logits - step.x.flatten(1)).square().sum(dim=1).mean()


class Uniform(Plugin):
    @hookimpl
    def weight(self):
        return 1.0


class CohortOptions(PluginOptions):
    rounds: list[list[int]] = Field(default_factory=list)


class Cohorts(Plugin):
    Options = CohortOptions

    @hookimpl
    def select_clients(self, server):
        return self.options.rounds[server.round]


class Personal(Plugin):
    @hookimpl
    def personal_parameters(self):
        return ["classifier.*"]


class Freezes(Plugin):
    """Keeps the encoder fixed from round 1 on; listed behind the method, whose begin_local knows nothing of it."""

    @hookimpl
    def begin_local(self, client):
        if client.round > 0:
            client.freeze(["encoder.*"])


class Exchanger(Plugin):
    exchanges = ("classifier.*",)


class Owner(Plugin):
    owns = ("classifier.*",)

    @hookimpl
    def aggregate(self, server):
        return None


class Optimizer(Plugin):
    server_optimizer = True

    @hookimpl
    def server_step(self, mean):
        return None


TOY = {
    "dataset": HERE + "two_centres",
    "model": HERE + "at_origin",
    "partition": HERE + "by_centre",
    "clients": 2,
    "rounds": 1,
    "local_epochs": 2,
    "batch_size": 8,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def run(plugins, notify=None, **options):
        config = RunConfig(**{**DIGITS, **options}, plugins=plugins, out=tempfile.mkdtemp(dir=root))
        return fedcore.run(config, notify=notify)

    return run


@pytest.fixture(scope="module")
def toy(go):
    return lambda plugins, **options: go({HERE + "Quadratic": {}, **plugins}, **{**TOY, **options})


@pytest.fixture
def no_host_sync(monkeypatch):
    """Forbid waiting for the device in every training step."""
    taken = []

    def watching(*arguments):
        with forbid_host_sync():
            batch = train_batch(*arguments)
        taken.append(batch.depends_on)
        return batch

    monkeypatch.setattr("fedcore.local.train_batch", watching)
    return taken


def bytes_of(result):
    return (result.directory / "model.safetensors").read_bytes()


def weights(result):
    return read_tensors(result.directory / "model.safetensors")[0]


def lines(result):
    return RunDirectory(result.directory).read_metrics()


def committed(result):
    return RunDirectory(result.directory).checkpoints.load()


def server_state(result):
    return committed(result).plugins.get(NAME, {})


def client_state(result, client):
    return RunDirectory(result.directory).clients.read(client, committed(result).manifest.get(client)).get(NAME, {})


def near(tensor, values, tolerance=1e-6):
    np.testing.assert_allclose(tensor.double().numpy(), values, rtol=0, atol=tolerance)


def interrupted(go, plugins, after, **options):
    """Run, stop after a round, resume; returns the result."""
    where = {}

    def stop(event, details):
        where.update(details if event == "start" else {})
        if event == "round" and details["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(FedcoreError, match="interrupted"):
        go(plugins, notify=stop, **options)
    return fedcore.resume(where["directory"], allow_code=True)


def sgd(w, gradient, steps, lr, momentum, weight_decay):
    """PyTorch's SGD in float64."""
    velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + gradient(w) + weight_decay * w
        w = w - lr * velocity
    return w


def moved_by(steps, momentum):
    """A(K) by its closed form, which the code does not use."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


CENTRES = np.array([[2.0, 0.0], [0.0, 4.0], [-1.0, 1.0]])
COHORTS = [[0, 1], [1], [1, 2], [0, 2], [0], [0, 1, 2]]
SIMULATED = {
    "dataset": HERE + "three_centres",
    "clients": 3,
    "rounds": len(COHORTS),
    "local_epochs": 3,
    "batch_size": 1,  # K = 3, 9, 6
    "lr": 0.02,
    "lr_decay": 0.7,
    "momentum": 0.5,
    "weight_decay": 0.1,
}
STEPS, SIZES = (3, 9, 6), (1, 3, 2)


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_equations_against_numpy(momentum):
    g = torch.Generator().manual_seed(0)
    w, x, y, c, own = torch.randn(5, 3, 4, dtype=torch.float64, generator=g)
    gap = eq.correction(w, c, own)
    np.testing.assert_allclose(gap, c.numpy() - own.numpy(), rtol=1e-15)
    expected = own.numpy() - c.numpy() + (x.numpy() - y.numpy()) / (0.1 * moved_by(7, momentum))
    found = eq.renewed_control(x, y, gap, lr=0.1, steps=7, momentum=momentum)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(eq.server_update(x, y, 0.3), 0.7 * x.numpy() + 0.3 * y.numpy(), rtol=1e-12)


def test_without_c_or_c_i_they_are_0():
    w = torch.randn(3, requires_grad=True)
    one = torch.ones(3)
    assert eq.correction(w, None, None).tolist() == [0.0] * 3
    assert eq.correction(w, one, None).tolist() == [1.0] * 3
    assert eq.correction(w, None, one).tolist() == [-1.0] * 3
    assert not eq.correction(w, one, one).requires_grad
    assert eq.renewed_control(one, -one, None, lr=0.5, steps=2, momentum=0.0).tolist() == [2.0] * 3


def test_a_correction_lies_in_memory_as_its_parameter_does():
    """Otherwise every step would add gradients of two layouts."""
    w = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert eq.correction(w, torch.randn(4, 3, 5, 5), None).stride() == w.stride()


def test_the_wrong_divisor_is_what_the_tests_below_say():
    assert moved_by(3, 0.9) == pytest.approx(5.61)
    assert moved_by(50, 0.9) / 50 == pytest.approx(8.21, abs=5e-3)


# --- hand cases in the round loop --------------------------------------------------------------------------------


def test_the_hand_case(toy):
    one, two = toy({NAME: {}}), toy({NAME: {}}, rounds=2)
    near(weights(one)[W], [0.75, 1.5])
    near(server_state(one)[f"c.{W}"], [-0.75, -1.5])
    near(client_state(one, 0)[W], [-1.5, 0.0])
    near(client_state(one, 1)[W], [0.0, -3.0])
    near(weights(two)[W], [0.9375, 1.875])
    near(server_state(two)[f"c.{W}"], [-0.1875, -0.375])
    near(client_state(two, 0)[W], [-1.125, 1.5])
    near(client_state(two, 1)[W], [0.75, -2.25])
    near(weights(toy({NAME: {}}, rounds=20))[W], [1.0, 2.0], 1e-3)


def test_the_servers_learning_rate(toy):
    near(weights(toy({NAME: {"server_lr": 0.5}}))[W], [0.375, 0.75])
    near(weights(toy({NAME: {"server_lr": 2.0}}))[W], [1.5, 3.0])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_simulation_in_numpy(toy, weighting):
    """Momentum, weight decay, lr decay, clients of different K, clients that sit rounds out."""
    w, c, own = np.zeros(2), np.zeros(2), np.zeros((3, 2))
    importance = np.array([1.0, 1.0, 1.0] if weighting == "uniform" else SIZES, dtype=float)
    for number, cohort in enumerate(COHORTS):
        lr, trained = 0.02 * 0.7**number, {}
        for i in cohort:

            def gradient(v, i=i, c=c):
                return v - CENTRES[i] + c - own[i]

            trained[i] = sgd(w, gradient, STEPS[i], lr, 0.5, 0.1)
        for i, y in trained.items():
            own[i] = own[i] - c + (w - y) / (lr * moved_by(STEPS[i], 0.5))
        w = np.average(list(trained.values()), axis=0, weights=importance[list(trained)])
        seen = sorted({i for earlier in COHORTS[: number + 1] for i in earlier})
        c = importance @ own / (3 * importance[seen].mean())
    result = toy({NAME: {"weighting": weighting}, HERE + "Cohorts": {"rounds": COHORTS}}, **SIMULATED)
    near(weights(result)[W], w)
    for i in range(3):
        near(client_state(result, i)[W], own[i], 2e-5)
    sizes = server_state(result).get("sizes", {"0": 1})
    near(server_state(result)[f"c.{W}"] / np.mean(list(sizes.values())), c, 2e-5)
    assert sizes == ({"0": 1} if weighting == "uniform" else {"0": 1, "1": 3, "2": 2})
    assert np.abs(c).max() > 0.1


def test_local_steps_descend_the_corrected_loss(toy):
    """One step of lr 0.5 from w_1 = (0.5, 1) in round 2: w - 0.5 (w - centre + c - c_i)."""
    one, two = toy({NAME: {}}, local_epochs=1), toy({NAME: {}}, local_epochs=1, rounds=2)
    w, c = weights(one)[W], server_state(one)[f"c.{W}"]
    near(w, [0.5, 1.0])
    expected = np.mean(
        [w - 0.5 * (w - torch.tensor(z) + c - client_state(one, i)[W]) for i, z in enumerate(CENTRES[:2])], axis=0
    )
    near(weights(two)[W], expected)
    near(client_state(two, 0)[W], w.numpy() - CENTRES[0])  # the gradient itself, free of the correction


# --- momentum and its divisor ------------------------------------------------------------------------------------


class Constant(Plugin):
    """Local gradients -1 and 1 everywhere, so that c - c_0 should be 1."""

    @hookimpl
    def task_loss(self, step):
        return step.logits.mean(dim=0).sum() * (2.0 * step.client.id - 1.0)


def plant_the_wrong_divisor(monkeypatch):
    monkeypatch.setattr(eq, "effective_steps", lambda steps, momentum: float(steps))


def gaps(go, rounds):
    """Return c - c_0 after each round."""
    where, found = {}, []

    def look(event, details):
        where.update(details if event == "start" else {})
        if event == "round":
            directory = RunDirectory(where["directory"])
            state = directory.checkpoints.load()
            own = directory.clients.read(0, state.manifest[0])[NAME][W]
            found.append((state.plugins[NAME][f"c.{W}"] - own)[0].item())

    options = {**TOY, "local_epochs": 50, "rounds": rounds, "lr": 0.001, "momentum": 0.9}
    go({HERE + "Constant": {}, NAME: {}}, notify=look, **options)
    return found


def test_constant_gradients_with_momentum_give_c_minus_c_i_at_once_and_for_ever(go):
    np.testing.assert_allclose(gaps(go, 4), [1, 1, 1, 1], rtol=1e-3)


def test_the_wrong_divisor_makes_it_alternate_and_grow(go, monkeypatch):
    """e+ = r - (r - 1) e with r = A(50) / 50 = 8.21."""
    plant_the_wrong_divisor(monkeypatch)
    np.testing.assert_allclose(gaps(go, 4), [8.21, -50.97, 375.7, -2700], rtol=5e-3)


HARD = {"alpha": 0.1, "momentum": 0.9, "lr": 0.01, "local_epochs": 10, "rounds": 4}  # K = 40, 60, 60, 80


def task_losses(result):
    return [line["losses"]["task"] for line in lines(result)]


def test_momentum_many_local_steps_and_dirichlet_01_train_well(go):
    result = go({NAME: {}}, **HARD)
    assert task_losses(result) == sorted(task_losses(result), reverse=True)
    assert task_losses(result)[-1] < 0.3
    assert max(t.abs().max() for t in server_state(result).values()) < 0.1


def test_with_the_wrong_divisor_the_same_run_diverges(go, monkeypatch):
    plant_the_wrong_divisor(monkeypatch)
    result = go({NAME: {}}, **HARD)
    assert task_losses(result)[-1] > 1e3
    assert max(t.abs().max() for t in server_state(result).values()) > 1e2


# --- c = mean of all c_i -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_c_is_the_mean_of_all_c_i(go, weighting, participation):
    result = go({NAME: {"weighting": weighting}}, participation=participation, rounds=5, alpha=0.1)
    state = server_state(result)
    names = [name.removeprefix("c.") for name in state if name != "sizes"]
    assert set(names) == {name for name, _ in result.model.named_parameters()}
    assert (len({tuple(line["cohort"]) for line in lines(result)}) > 2) == (participation < 1)
    sizes = {int(k): v for k, v in state.get("sizes", {}).items()}
    assert (len(sizes) == 4) == (weighting == "samples")
    for name in names:
        own = [client_state(result, i).get(name, torch.zeros(())).double() * sizes.get(i, 1) for i in range(4)]
        mean = sum(own) / 4
        scale = float(mean.abs().max())
        assert scale > 0
        near(state[f"c.{name}"] / scale, (mean / scale).numpy(), 1e-6)


def test_who_is_not_sampled_keeps_his_c_i(go):
    cohorts = {HERE + "Cohorts": {"rounds": [[0, 1], [1, 2], [2, 3]]}}
    first, last = go({NAME: {}, **cohorts}, rounds=1), go({NAME: {}, **cohorts}, rounds=3)
    assert client_state(first, 2) == {}
    assert set(client_state(last, 2)) == {name for name, _ in last.model.named_parameters()}
    for name, tensor in client_state(first, 0).items():
        assert torch.equal(client_state(last, 0)[name], tensor)


# --- identities --------------------------------------------------------------------------------------------------


def test_round_1_is_fedavg_with_the_same_weights_to_the_bit(go):
    assert bytes_of(go({NAME: {}}, rounds=1)) == bytes_of(go({HERE + "Uniform": {}}, rounds=1))
    assert bytes_of(go({NAME: {"weighting": "samples"}}, rounds=1)) == bytes_of(go({}, rounds=1))
    assert set(lines(go({NAME: {}}, rounds=1))[0]["losses"]) == {"task"}


def test_round_2_is_not(go):
    result = go({NAME: {}})
    assert bytes_of(result) != bytes_of(go({HERE + "Uniform": {}}))
    assert bytes_of(result) == bytes_of(go({NAME: {}}))
    assert set(lines(result)[1]["losses"]) == {"task", "scaffold.correction"}
    assert len({bytes_of(go({NAME: o})) for o in ({}, {"weighting": "samples"}, {"server_lr": 0.9})}) == 3


def test_one_client_is_never_corrected(go):
    """c = c_1, so SCAFFOLD is FedAvg but for rounding."""
    one, other = go({NAME: {}}, clients=1, rounds=3), go({}, clients=1, rounds=3)
    for name, w in weights(one).items():
        torch.testing.assert_close(w, weights(other)[name], rtol=1e-3, atol=1e-5)


def test_a_resumed_run_has_the_same_bits(go):
    options = {"rounds": 4, "participation": 0.5}
    plugins = {NAME: {"weighting": "samples", "server_lr": 0.8}}
    assert bytes_of(interrupted(go, plugins, 1, **options)) == bytes_of(go(plugins, **options))


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(go):
    assert bytes_of(go({NAME: {}}, workers=2, rounds=3)) == bytes_of(go({NAME: {}}, rounds=3))


# --- what it leaves alone ----------------------------------------------------------------------------------------


def test_buffers_have_no_part_in_it(go):
    """With weights that do not move (lr 1e-30) BatchNorm's statistics are FedAvg's, to the bit."""
    options = {"model": HERE + "with_buffers", "lr": 1e-30, "weight_decay": 0.0, "rounds": 3}
    result, fedavg = go({NAME: {"server_lr": 0.5}}, **options), dict(go({}, **options).model.named_buffers())
    assert (fedavg["encoder.base.2.running_mean"] != 0).all()
    assert fedavg["encoder.base.2.num_batches_tracked"] > 0
    for name, buffer in result.model.named_buffers():
        assert torch.equal(buffer, fedavg[name])


def test_buffers_are_averaged_as_ever_while_weights_are_corrected(go):
    result = go({NAME: {"server_lr": 1.5}}, model=HERE + "with_buffers", rounds=3)
    corrected = {name.removeprefix("c.") for name in server_state(result)}
    assert corrected == set(client_state(result, 0)) == {name for name, _ in result.model.named_parameters()}
    norm = result.model.encoder.base[2]
    assert norm.num_batches_tracked.dtype == torch.int64
    assert (norm.running_var > 0).all()


def test_personal_parameters_are_neither_corrected_nor_sent(go):
    result = go({NAME: {}, HERE + "Personal": {}}, rounds=3)
    assert not [name for name in [*server_state(result), *client_state(result, 0)] if "classifier" in name]
    assert f"c.{next(name for name, _ in result.model.named_parameters())}" in server_state(result)


def test_frozen_parameters_keep_their_c_i(go):
    plugins = {NAME: {}, HERE + "Freezes": {}}
    one, two = go(plugins, rounds=1), go(plugins, rounds=2)
    for name, before in client_state(one, 0).items():
        assert torch.equal(client_state(two, 0)[name], before) == name.startswith("encoder")
    for name, before in server_state(one).items():
        assert torch.equal(server_state(two)[name], before) == name.startswith("c.encoder")


def test_clients_of_one_sample_and_classes_that_a_client_lacks(go):
    plain = go({NAME: {}}, partition=HERE + "first_alone", rounds=3)
    assert [line["accepted"] for line in lines(plain)] == [4, 4, 4]
    skipped = go({NAME: {}}, partition=HERE + "first_alone", model=HERE + "with_buffers", rounds=3)
    assert [line["failures"][0]["kind"] for line in lines(skipped)] == ["no_steps"] * 3
    assert client_state(skipped, 0) == {}
    assert all(t.isfinite().all() for t in server_state(skipped).values())


# --- the step ----------------------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_the_device(go, no_host_sync):
    go({NAME: {}}, rounds=2, local_epochs=2)
    assert max(no_host_sync, key=len) == {"client"}


def test_the_term_is_one_node_over_the_parameters_themselves():
    class Client:
        def __init__(self, scratch):
            self.scratch = scratch

    class Step:
        def __init__(self, parameters, scratch):
            self.parameters, self.client = parameters, Client(scratch)

    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    directions = {p: torch.randn_like(p) for p in parameters}
    plugin = Scaffold(ScaffoldOptions())
    assert plugin.local_loss(Step(parameters, {})) is None
    loss = plugin.local_loss(Step(parameters, {"correction": directions}))
    assert loss.weight == 1.0
    below = [node for node, _ in loss.value.grad_fn.next_functions if node is not None]
    assert [type(node).__name__ for node in below] == ["AccumulateGrad"] * 2
    loss.value.backward()
    assert all(torch.equal(p.grad, directions[p]) for p in parameters)


def test_what_travels(go):
    result = go({NAME: {}}, rounds=3)
    size = 4 * sum(p.numel() for p in result.model.parameters())
    found = result.summary["bytes"]["by_plugin"][NAME]
    assert found == {"down": 2 * 4 * size, "up": 3 * 4 * size}, "c goes down from round 1 on, changes go up in each"


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"server_lr": 0}, {"server_lr": float("nan")}, {"weighting": "none"}, {"eta": 1}], ids=str
)
def test_options_out_of_bounds_are_refused(go, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        go({NAME: options})


@pytest.mark.parametrize(
    ("options", "other", "reason"),
    [
        ({}, "Exchanger", "how far a client's model moved"),
        ({}, "Uniform", "weight"),
        ({"server_lr": 0.5}, "Optimizer", "server optimizers"),
        ({"server_lr": 0.5}, "Owner", "owns the aggregation"),
    ],
)
def test_what_cannot_be_combined_is_refused(go, options, other, reason):
    with pytest.raises(PluginConflictError, match=reason):
        go({NAME: options, HERE + other: {}})


def test_with_other_server_plugins_and_local_terms(go):
    go({NAME: {}, HERE + "Optimizer": {}})
    result = go({NAME: {}, "fedprox": {"mu": 0.1}})
    assert set(lines(result)[1]["losses"]) == {"task", "scaffold.correction", "fedprox.proximal"}


def test_the_readme_names_every_option_with_its_default():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name, field in ScaffoldOptions.model_fields.items():
        assert f"| `{name}` | `{field.default}` |" in text
