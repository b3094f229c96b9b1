"""FedDC: hand cases, independent simulations, FedDC without its linear term is FedDyn, and s = mean s_i."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

import fedcore
import fedcore_feddc.equations as eq
from fedcore import Plugin, PluginOptions, RunConfig, SplitModel, hookimpl
from fedcore.data import Dataset, ResidentSamples
from fedcore.errors import ConfigError, FedcoreError, PluginConflictError
from fedcore.local import train_batch
from fedcore.rundir import RunDirectory
from fedcore.serial import read_tensors
from fedcore.testing import forbid_host_sync
from fedcore_feddc import FedDC, FedDCOptions

NAME, OPTIONS = "feddc", FedDCOptions
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


def plain(state):
    return {name.removeprefix("h.").removeprefix("s.") for name in state}


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_equations_against_numpy(momentum):
    g = torch.Generator().manual_seed(0)
    w, y, h, s, own = torch.randn(5, 3, 2, dtype=torch.float64, generator=g)
    np.testing.assert_allclose(eq.drift_target(w, h), w.numpy() - h.numpy(), rtol=1e-15)
    np.testing.assert_allclose(eq.renewed_drift(h, w, y), h.numpy() + y.numpy() - w.numpy(), rtol=1e-12)
    assert torch.equal(eq.drift_target(w, None), w)
    assert torch.equal(eq.renewed_drift(None, w, y), y - w)
    gap = eq.gradient_gap(w, s, own)
    np.testing.assert_allclose(gap, s.numpy() - own.numpy(), rtol=1e-15)
    assert eq.gradient_gap(w, None, None).abs().max() == 0
    expected = own.numpy() - s.numpy() + (w.numpy() - y.numpy()) / (0.1 * moved_by(7, momentum))
    np.testing.assert_allclose(eq.renewed_gradient(w, y, gap, lr=0.1, steps=7, momentum=momentum), expected, rtol=1e-12)
    after = eq.renewed_mean_drift(h, w, y, 0.25)
    np.testing.assert_allclose(after, h.numpy() + 0.25 * (y.numpy() - w.numpy()), rtol=1e-12)
    assert eq.corrected_mean(y.float(), after).dtype == torch.float32
    np.testing.assert_allclose(eq.corrected_mean(y, after), y.numpy() + after.numpy(), rtol=1e-12)


def test_a_gap_lies_in_memory_as_its_parameter_does():
    w = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert eq.gradient_gap(w, torch.randn(4, 3, 5, 5), None).stride() == w.stride()


def test_the_terms_have_the_gradient_of_the_papers():
    """alpha (w - w_t + h_i) + s - s_i, by two nodes over the parameters themselves."""
    g = torch.Generator().manual_seed(2)
    w, w_t, h, s, own = torch.randn(5, 6, dtype=torch.float64, generator=g)
    w = nn.Parameter(w)

    class Client:
        scratch = {"target": {w: eq.drift_target(w_t, h)}, "gap": {w: eq.gradient_gap(w, s, own)}}

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
    one, two = toy({NAME: {"alpha": 1.0}}), toy({NAME: {"alpha": 1.0}}, rounds=2)
    near(weights(one)[W], [1.0, 2.0])
    near(server_state(one)[f"s.{W}"], [-0.5, -1.0])
    near(client_state(one, 0)[f"h.{W}"], [1.0, 0.0])
    near(client_state(one, 1)[f"h.{W}"], [0.0, 2.0])
    near(client_state(one, 0)[f"s.{W}"], [-1.0, 0.0])
    near(client_state(one, 1)[f"s.{W}"], [0.0, -2.0])
    near(weights(two)[W], [1.0, 2.0])
    near(server_state(two)[f"s.{W}"], [0.25, 0.5])
    near(client_state(two, 0)[f"h.{W}"], [0.75, -0.5])
    near(client_state(two, 1)[f"h.{W}"], [-0.25, 1.5])
    near(client_state(two, 0)[f"s.{W}"], [-0.25, 1.5])
    near(client_state(two, 1)[f"s.{W}"], [0.75, -0.5])


@pytest.mark.parametrize(("alpha", "linear"), [(0.1, True), (1.0, True), (1.0, False)])
def test_a_simulation_in_numpy(toy, alpha, linear):
    """Momentum, weight decay, lr decay, clients of different K, clients that sit rounds out."""
    w, s, own, h = np.zeros(2), np.zeros(2), np.zeros((3, 2)), np.zeros((3, 2))
    for number, cohort in enumerate(COHORTS):
        lr, trained = 0.02 * 0.7**number, {}
        for i in cohort:

            def gradient(v, i=i, w=w, s=s):
                return v - CENTRES[i] + alpha * (v - w + h[i]) + linear * (s - own[i])

            trained[i] = sgd(w, gradient, STEPS[i], lr, 0.5, 0.1)
        for i, y in trained.items():
            h[i] = h[i] + y - w
            own[i] = linear * (own[i] - s + (w - y) / (lr * moved_by(STEPS[i], 0.5)))
        w, s = np.mean(list(trained.values()), axis=0) + h.mean(axis=0), own.mean(axis=0)
    plugins = {NAME: {"alpha": alpha, "linear": linear}, HERE + "Cohorts": {"rounds": COHORTS}}
    result = toy(plugins, **SIMULATED)
    near(weights(result)[W], w, 1e-5)
    near(server_state(result)[f"h.{W}"], h.mean(axis=0))
    for i in range(3):
        near(client_state(result, i)[f"h.{W}"], h[i])
    assert (f"s.{W}" in server_state(result)) == (f"s.{W}" in client_state(result, 0)) == linear
    if linear:
        near(server_state(result)[f"s.{W}"], s, 5e-5)
        for i in range(3):
            near(client_state(result, i)[f"s.{W}"], own[i], 5e-5)


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_s_and_the_servers_drift_are_means_over_all_clients(go, participation):
    result = go({NAME: {}}, participation=participation, rounds=5, alpha=0.1)
    state = server_state(result)
    assert set(state) == {f"{kind}.{name}" for kind in "hs" for name, _ in result.model.named_parameters()}
    assert (len({tuple(line["cohort"]) for line in lines(result)}) > 2) == (participation < 1)
    for name, mean in state.items():
        own = [client_state(result, i).get(name, torch.zeros(())).double() for i in range(4)]
        scale = float(mean.abs().max())
        assert scale > 0
        near(mean / scale, (sum(own) / 4 / scale).numpy(), 1e-5)


def test_who_is_not_sampled_keeps_his_state(go):
    cohorts = {HERE + "Cohorts": {"rounds": [[0, 1], [1, 2], [2, 3]]}}
    first, last = go({NAME: {}, **cohorts}, rounds=1), go({NAME: {}, **cohorts}, rounds=3)
    assert client_state(first, 2) == {}
    for name, tensor in client_state(first, 0).items():
        assert torch.equal(client_state(last, 0)[name], tensor)


class Constant(Plugin):
    """Local gradients -1 and 1 everywhere."""

    @hookimpl
    def task_loss(self, step):
        return step.logits.mean(dim=0).sum() * (2.0 * step.client.id - 1.0)


def test_s_i_is_one_gradient_with_momentum_too(go, monkeypatch):
    """The rule of SCAFFOLD: with K for A(K) s - s_i would alternate and grow (8.21, -50.97, ...)."""
    options = {**TOY, "local_epochs": 50, "rounds": 2, "lr": 0.001, "momentum": 0.9}

    def gap():
        result = go({HERE + "Constant": {}, NAME: {"alpha": 1e-6}}, **options)
        return (server_state(result)[f"s.{W}"] - client_state(result, 0)[f"s.{W}"])[0].item()

    assert gap() == pytest.approx(1, rel=1e-3)
    monkeypatch.setattr(eq, "effective_steps", lambda steps, momentum: float(steps))
    assert gap() == pytest.approx(-50.97, rel=5e-3)


# --- identities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_without_its_linear_term_it_is_feddyn_to_the_bit(go, participation):
    pytest.importorskip("fedcore_feddyn")
    options = {"rounds": 4, "participation": participation}
    alone = go({NAME: {"alpha": 0.1, "linear": False}}, **options)
    feddyn = go({"feddyn": {"alpha": 0.1}}, **options)
    assert bytes_of(alone) == bytes_of(feddyn)
    assert bytes_of(go({NAME: {"alpha": 0.1}}, **options)) != bytes_of(feddyn)
    for i in range(4):
        for name, dual in (
            RunDirectory(feddyn.directory).clients.read(i, committed(feddyn).manifest[i])["feddyn"].items()
        ):
            assert torch.equal(client_state(alone, i)[f"h.{name}"], dual)


def test_the_local_problem_of_round_1_is_fedproxs(go):
    dc = lines(go({NAME: {"alpha": 0.3}}, rounds=1))[0]["losses"]
    prox = lines(go({"fedprox": {"mu": 0.3}, HERE + "Uniform": {}}, rounds=1))[0]["losses"]
    assert dc == {"task": prox["task"], "feddc.drift": prox["fedprox.proximal"]}


def test_every_option_changes_the_trajectory(go):
    runs = [go({NAME: options}, rounds=2) for options in ({}, {"alpha": 0.5}, {"linear": False})]
    assert len({bytes_of(run) for run in runs}) == 3
    assert bytes_of(runs[0]) == bytes_of(go({NAME: {"alpha": 0.01, "linear": True}}, rounds=2))
    assert set(lines(runs[0])[1]["losses"]) == {"task", "feddc.drift", "feddc.gradient"}


def test_a_resumed_run_has_the_same_bits(go):
    options = {"rounds": 4, "participation": 0.5}
    assert bytes_of(interrupted(go, {NAME: {}}, 1, **options)) == bytes_of(go({NAME: {}}, **options))


def test_a_step_does_not_wait_for_the_device(go, no_host_sync):
    go({NAME: {}}, local_epochs=2)
    assert max(no_host_sync, key=len) == {"client"}


def test_what_travels(go):
    result = go({NAME: {}}, rounds=3)
    size = 4 * sum(p.numel() for p in result.model.parameters())
    found = result.summary["bytes"]["by_plugin"][NAME]
    assert found == {"down": 2 * 4 * size, "up": 3 * 4 * size}, "s goes down from round 1 on, changes go up in each"
    assert NAME not in go({NAME: {"linear": False}}).summary["bytes"]["by_plugin"]


def test_personal_parameters_are_neither_corrected_nor_sent(go):
    result = go({NAME: {}, HERE + "Personal": {}}, rounds=3)
    assert server_state(result)
    assert not [name for name in [*server_state(result), *client_state(result, 0)] if "classifier" in name]


def test_frozen_parameters_keep_their_state(go):
    plugins = {NAME: {}, HERE + "Freezes": {}}
    one, two = go(plugins, rounds=1), go(plugins, rounds=2)
    for name, before in client_state(one, 0).items():
        assert torch.equal(client_state(two, 0)[name], before) == ("encoder" in name)
        assert torch.equal(weights(two)[name[2:]], weights(one)[name[2:]]) == ("encoder" in name)


def test_with_fedprox(go):
    assert "fedprox.proximal" in lines(go({NAME: {}, "fedprox": {"mu": 0.1}}))[1]["losses"]


# --- what it leaves alone ----------------------------------------------------------------------------------------


def test_buffers_have_no_part_in_it(go):
    """With weights that do not move (lr 1e-30) BatchNorm's statistics are FedAvg's, to the bit."""
    options = {"model": HERE + "with_buffers", "lr": 1e-30, "weight_decay": 0.0, "rounds": 3}
    result, fedavg = go({NAME: {"alpha": 1.0}}, **options), dict(go({}, **options).model.named_buffers())
    assert (fedavg["encoder.base.2.running_mean"] != 0).all()
    assert fedavg["encoder.base.2.num_batches_tracked"] > 0
    for name, buffer in result.model.named_buffers():
        assert torch.equal(buffer, fedavg[name])


def test_buffers_are_averaged_as_ever_while_weights_are_corrected(go):
    result = go({NAME: {}}, model=HERE + "with_buffers", rounds=3)
    parameters = {name for name, _ in result.model.named_parameters()}
    assert plain(server_state(result)) == plain(client_state(result, 0)) == parameters
    norm = result.model.encoder.base[2]
    assert norm.num_batches_tracked.dtype == torch.int64
    assert (norm.running_var > 0).all()


def test_clients_of_one_sample_and_classes_that_a_client_lacks(go):
    whole = go({NAME: {}}, partition=HERE + "first_alone", rounds=3)
    assert [line["accepted"] for line in lines(whole)] == [4, 4, 4]
    skipped = go({NAME: {}}, partition=HERE + "first_alone", model=HERE + "with_buffers", rounds=3)
    assert [line["failures"][0]["kind"] for line in lines(skipped)] == ["no_steps"] * 3
    assert client_state(skipped, 0) == {}
    assert all(t.isfinite().all() for t in server_state(skipped).values())


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"alpha": 0}, {"alpha": -1}, {"alpha": float("inf")}, {"mu": 1}], ids=str)
def test_options_out_of_bounds_are_refused(go, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        go({NAME: options})


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("Exchanger", "how far a client's model moved"),
        ("Uniform", "weight"),
        ("Optimizer", "server optimizers"),
        ("Owner", "owns the aggregation"),
    ],
)
def test_what_cannot_be_combined_is_refused(go, other, reason):
    with pytest.raises(PluginConflictError, match=reason):
        go({NAME: {}, HERE + other: {}})


def test_the_readme_names_every_option_with_its_default():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name, field in OPTIONS.model_fields.items():
        assert f"| `{name}` | `{str(field.default).lower()}` |" in text
