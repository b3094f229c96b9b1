"""FedDyn: hand cases, an independent simulation in the paper's g and h, and what lasts over rounds of absence."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

import fedcore
import fedcore_feddyn.equations as eq
from fedcore import Plugin, PluginOptions, RunConfig, SplitModel, hookimpl
from fedcore.data import Dataset, ResidentSamples
from fedcore.errors import ConfigError, FedcoreError, PluginConflictError
from fedcore.local import train_batch
from fedcore.rundir import RunDirectory
from fedcore.serial import read_tensors
from fedcore.testing import forbid_host_sync
from fedcore_feddyn import FedDyn, FedDynOptions

NAME, OPTIONS = "feddyn", FedDynOptions
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
    return set(state)


# --- the equations -----------------------------------------------------------------------------------------------


def test_the_equations_against_numpy():
    g = torch.Generator().manual_seed(0)
    w, y, dual, mean_dual = torch.randn(4, 3, 2, dtype=torch.float64, generator=g)
    np.testing.assert_allclose(eq.shifted_target(w, dual), w.numpy() - dual.numpy(), rtol=1e-15)
    np.testing.assert_allclose(eq.renewed_dual(dual, w, y), dual.numpy() + y.numpy() - w.numpy(), rtol=1e-12)
    assert torch.equal(eq.shifted_target(w, None), w)
    assert torch.equal(eq.renewed_dual(None, w, y), y - w)
    after = eq.renewed_mean_dual(mean_dual, w, y, 0.25)
    np.testing.assert_allclose(after, mean_dual.numpy() + 0.25 * (y.numpy() - w.numpy()), rtol=1e-12)
    found = eq.corrected_mean(y.float(), after)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, y.numpy() + after.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 10.0])
def test_the_completed_square_has_the_papers_gradient(alpha):
    """Gradient of -<g, w> + alpha/2 |w - w_t|^2 is -g + alpha (w - w_t), g = -alpha lambda."""
    g = torch.Generator().manual_seed(1)
    w, w_t, dual = torch.randn(3, 5, dtype=torch.float64, generator=g)
    w = nn.Parameter(w)

    class Client:
        scratch = {"target": {w: eq.shifted_target(w_t, dual)}}

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
    return -alpha * client_state(result, client)[W]


def test_the_hand_case(toy):
    one, two = toy({NAME: {"alpha": 1.0}}), toy({NAME: {"alpha": 1.0}}, rounds=2)
    near(weights(one)[W], [1.0, 2.0])
    near(-server_state(one)[W], [-0.5, -1.0])
    near(gradients(one, 0), [-1.0, 0.0])
    near(gradients(one, 1), [0.0, -2.0])
    near(weights(two)[W], [1.0, 2.0])
    near(-server_state(two)[W], [-0.25, -0.5])
    near(gradients(two, 0), [-1.0, 1.0])
    near(gradients(two, 1), [0.5, -2.0])


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_it_ends_at_the_optimum_of_the_uniform_mean(toy, alpha):
    result = toy({NAME: {"alpha": alpha}}, rounds=60, lr=0.2, local_epochs=10, checkpoint_every=60)
    near(weights(result)[W], [1.0, 2.0], 1e-4)
    for i in range(2):  # and lambda_i holds the clients' gradients there
        near(gradients(result, i, alpha), np.array([1.0, 2.0]) - CENTRES[i], 1e-3)


def test_a_solved_local_problem_leaves_the_gradient_at_its_solution(toy):
    """First-order condition: g_i = grad F_i(y_i) = y_i - centre_i; y_i lies halfway from w_0 = 0 to the centre."""
    result = toy({NAME: {"alpha": 1.0}}, local_epochs=60)
    for i in range(2):
        near(gradients(result, i), CENTRES[i] / 2 - CENTRES[i])


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_a_simulation_in_numpy_with_the_papers_g_and_h(toy, alpha):
    """Momentum, weight decay, lr decay, clients of different K, clients that sit rounds out."""
    w, h, g = np.zeros(2), np.zeros(2), np.zeros((3, 2))
    for number, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:

            def gradient(v, i=i, w=w):
                return v - CENTRES[i] - g[i] + alpha * (v - w)

            trained[i] = sgd(w, gradient, STEPS[i], 0.02 * 0.7**number, 0.5, 0.1)
        for i, y in trained.items():
            g[i] = g[i] - alpha * (y - w)
        h = h - alpha * sum(y - w for y in trained.values()) / 3
        w = np.mean(list(trained.values()), axis=0) - h / alpha
    result = toy({NAME: {"alpha": alpha}, HERE + "Cohorts": {"rounds": COHORTS}}, **SIMULATED)
    near(weights(result)[W], w, 1e-5)
    near(-alpha * server_state(result)[W], h)
    for i in range(3):
        near(gradients(result, i, alpha), g[i])
    assert np.abs(h).max() > 0.01


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_the_servers_state_is_the_mean_of_all_clients(go, participation):
    result = go({NAME: {}}, participation=participation, rounds=5, alpha=0.1)
    state = server_state(result)
    assert set(state) == {name for name, _ in result.model.named_parameters()}
    assert (len({tuple(line["cohort"]) for line in lines(result)}) > 2) == (participation < 1)
    for name, mean_dual in state.items():
        own = [client_state(result, i).get(name, torch.zeros(())).double() for i in range(4)]
        scale = float(mean_dual.abs().max())
        assert scale > 0
        near(mean_dual / scale, (sum(own) / 4 / scale).numpy(), 1e-5)


def test_who_is_not_sampled_keeps_his_lambda(go):
    cohorts = {HERE + "Cohorts": {"rounds": [[0, 1], [1, 2], [2, 3]]}}
    first, last = go({NAME: {}, **cohorts}, rounds=1), go({NAME: {}, **cohorts}, rounds=3)
    assert client_state(first, 2) == {}
    for name, tensor in client_state(first, 0).items():
        assert torch.equal(client_state(last, 0)[name], tensor)


# --- identities --------------------------------------------------------------------------------------------------


def test_the_local_problem_of_round_1_is_fedproxs(go):
    """mu = alpha, to the bit; the server then adds the mean displacement once more."""
    dyn = go({NAME: {"alpha": 0.3}}, rounds=1)
    prox = go({"fedprox": {"mu": 0.3}, HERE + "Uniform": {}}, rounds=1)
    ours, theirs = lines(dyn)[0]["losses"], lines(prox)[0]["losses"]
    assert ours["task"] == theirs["task"]
    assert ours["feddyn.dynamic"] == theirs["fedprox.proximal"] > 0
    for name, mean in weights(prox).items():
        torch.testing.assert_close(weights(dyn)[name] - server_state(dyn)[name].float(), mean)


def test_alpha_changes_the_trajectory_and_a_larger_one_holds_the_client_nearer(go):
    runs = [go({NAME: {"alpha": alpha}}, rounds=1) for alpha in (0.01, 1.0, 10.0)]
    distances = [lines(run)[0]["losses"]["feddyn.dynamic"] for run in runs]
    assert distances[0] > distances[1] > distances[2] > 0
    assert bytes_of(runs[0]) == bytes_of(go({NAME: {}}, rounds=1)), "the default, and twice the same bits"
    assert len({bytes_of(run) for run in runs}) == 3


def test_a_tiny_alpha_divides_nothing(go):
    assert all(t.isfinite().all() for t in weights(go({NAME: {"alpha": 1e-38}}, rounds=3)).values())


def test_a_resumed_run_has_the_same_bits(go):
    options = {"rounds": 4, "participation": 0.5}
    assert bytes_of(interrupted(go, {NAME: {}}, 1, **options)) == bytes_of(go({NAME: {}}, **options))


def test_a_step_does_not_wait_for_the_device(go, no_host_sync):
    go({NAME: {}}, local_epochs=2)
    assert max(no_host_sync, key=len) == {"client"}


def test_nothing_travels_but_the_model(go):
    assert NAME not in go({NAME: {}}).summary["bytes"]["by_plugin"]


def test_personal_parameters_are_not_regularized(go):
    result = go({NAME: {}, HERE + "Personal": {}}, rounds=3)
    assert server_state(result)
    assert not [name for name in [*server_state(result), *client_state(result, 0)] if "classifier" in name]


def test_frozen_parameters_keep_their_lambda(go):
    plugins = {NAME: {}, HERE + "Freezes": {}}
    one, two = go(plugins, rounds=1), go(plugins, rounds=2)
    for name, before in client_state(one, 0).items():
        assert torch.equal(client_state(two, 0)[name], before) == name.startswith("encoder")
        assert torch.equal(weights(two)[name], weights(one)[name]) == name.startswith("encoder")


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
