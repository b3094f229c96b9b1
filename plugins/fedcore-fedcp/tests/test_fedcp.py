"""FedCP: hand cases, the whole method against an independent one in float64, and what stays on a client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcore
from fedcore import ConfigError, Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore.data import load_dataset, load_partition
from fedcore_fedcp import (
    ConditionalHead,
    PolicyNetwork,
    context_of,
    equations,
    maximum_mean_discrepancy,
    mixed_head,
)
from fedcore_testing import (
    Cohorts as EveryCohort,
)
from fedcore_testing import (
    client_state,
    federations,
    installed,
    model_bytes,
    steps_without_host_sync,
)
from fedcore_testing import records as lines
from tests.sentences import raises

HERE = f"module:{__name__}."
SEEN: dict = {}


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


go = federations(samples=300)


@pytest.fixture
def without_noise(monkeypatch):
    """Take the Gumbel noise out, so that an independent computation can follow."""
    monkeypatch.setattr(F, "gumbel_softmax", lambda scores, dim: scores.softmax(dim))


def kept(result, client):
    """What a client keeps, of the core's: its personal parameters by name."""
    state = client_state(result, client)
    assert set(state) <= {"fedcore"}
    return {name.removeprefix("personal/classifier."): t for name, t in state.get("fedcore", {}).items()}


def tiny(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh()), 6, num_classes)


def with_batch_norm(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU()), 6, num_classes)


class Cohorts(EveryCohort):
    """Notes the first model, too."""

    @hookimpl
    def select_clients(self, server):
        SEEN.setdefault("start", {name: tensor.clone() for name, tensor in server.model.items()})
        return super().select_clients(server)


class Uploads(Plugin):
    """Notes what arrives."""

    @hookimpl
    def pre_aggregate(self, server, update):
        SEEN.setdefault("updates", []).append(update)
        SEEN.setdefault("global", []).append(dict(server.model))


# --- hand cases ---------------------------------------------------------------------------------------------


def test_the_hand_cases():
    head = ConditionalHead(nn.Linear(2, 2, bias=False), 2)
    head.personal.weight.data = torch.eye(2)
    head.head.weight.data = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    head.policy.forward = lambda x: torch.tensor([[0.25, 0.75]])
    assert head(torch.tensor([[1.0, 2.0]])).tolist() == [[0.75, 2.25]]
    head.personal.weight.data = torch.tensor([[1.0, 2.0], [2.0, 2.0]])
    head.renew_context()
    torch.testing.assert_close(head.context, torch.tensor([0.6, 0.8]))
    x, y = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]], dtype=torch.float64)
    assert maximum_mean_discrepancy(x, y).item() == pytest.approx(0.2323895, abs=5e-8)
    assert mixed_head(torch.tensor(3.0), torch.tensor(1.0)) == 2


# --- MMD ----------------------------------------------------------------------------------------------------


def numpy_mmd(x, y):
    """Pair by pair, as printed."""
    total, b = 0.0, len(x)
    for a in (10, 15, 20, 50):
        for i in range(b):
            for j in range(b):
                total += np.exp(-np.sum((x[i] - x[j]) ** 2) / (2 * a)) + np.exp(-np.sum((y[i] - y[j]) ** 2) / (2 * a))
                total -= 2 * np.exp(-np.sum((x[i] - y[j]) ** 2) / (2 * a))
    return total / b**2


@pytest.mark.parametrize(("b", "d"), [(1, 1), (5, 3), (16, 84)])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_mmd_against_numpy(b, d, offset):
    x, y = torch.randn(2, b, d, dtype=torch.float64, generator=torch.Generator().manual_seed(b))
    x, y = 2 * x + 0.5 + offset, y + offset
    expected = numpy_mmd(x.numpy(), y.numpy())
    assert maximum_mean_discrepancy(x, y).item() == pytest.approx(expected, rel=1e-9)
    assert maximum_mean_discrepancy(y, x).item() == pytest.approx(expected, rel=1e-9)
    if offset == 0:
        assert maximum_mean_discrepancy(x.float(), y.float()).item() == pytest.approx(expected, rel=1e-3)


def test_equal_features_have_mmd_0_without_gradient():
    x = torch.randn(7, 4, requires_grad=True)
    value = maximum_mean_discrepancy(x, x.detach().clone())
    value.backward()
    assert value.item() == 0
    torch.testing.assert_close(x.grad, torch.zeros_like(x), rtol=0, atol=1e-7)


def test_the_gradient_of_mmd_and_its_direction():
    x, y = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (x + 1.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: maximum_mean_discrepancy(x, y), (x,))
    value = maximum_mean_discrepancy(x, y)
    (gradient,) = torch.autograd.grad(value, x)
    moved = (x - gradient).detach()
    assert maximum_mean_discrepancy(moved, y) < value
    assert (moved.mean(0) - y.mean(0)).norm() < (x.mean(0) - y.mean(0)).norm()


@pytest.mark.parametrize(("lam", "stable"), [(0.9, True), (1.1, False)])
def test_the_bound_on_the_learning_rate_that_the_card_states(lam, stable):
    """Features W u + b near the global ones: a step multiplies their distance by 1 - lr lambda 0.473 (|u|^2 + 1)."""
    u = torch.full((8, 5), 2.0, dtype=torch.float64)
    curvature = sum(2 / a for a in equations.BANDWIDTHS) * (5 * 2.0**2 + 1)
    layer = nn.Linear(5, 3).double()
    received = layer(u).detach()
    with torch.no_grad():
        layer.bias += torch.tensor([1e-3, -2e-3, 1e-3])
    before = layer(u).detach() - received
    (2 / curvature * lam * maximum_mean_discrepancy(layer(u), received)).backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= parameter.grad
    after = layer(u).detach() - received
    torch.testing.assert_close(after, (1 - 2 * lam) * before, rtol=1e-5, atol=0)
    assert (after.norm() < before.norm()) == stable


def test_autocast_does_not_round_the_mmd():
    x, y = 10 * torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    plain = maximum_mean_discrepancy(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(maximum_mean_discrepancy(x, y), plain)
    assert maximum_mean_discrepancy(x.bfloat16(), y.bfloat16()).dtype == torch.float32


# --- the policy network and the heads -----------------------------------------------------------------------


def numpy_policy(x, w, b, gain, shift):
    z = x @ w.T + b
    z = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5) * gain + shift
    first, second = np.split(np.maximum(z, 0), 2, axis=1)
    return np.exp(first) / (np.exp(first) + np.exp(second))


def test_the_policy_network_against_numpy():
    policy, x = PolicyNetwork(5).double().eval(), torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    expected = numpy_policy(x.numpy(), *(p.detach().numpy() for p in policy.parameters()))
    np.testing.assert_allclose(policy(x).detach().numpy(), expected, rtol=1e-12)
    assert sum(p.numel() for p in policy.parameters()) == 2 * 5**2 + 6 * 5


def test_noise_in_training_only():
    policy, x = PolicyNetwork(5), torch.randn(4, 5)
    noisy = [policy.train()(x) for _ in range(2)]
    assert not torch.equal(*noisy)
    assert all(((r > 0) & (r < 1)).all() for r in noisy)
    assert torch.equal(*[policy.eval()(x) for _ in range(2)])


def test_noise_is_gumbels():
    """The larger of two noisy scores is the first with the softmax's probability."""
    policy = PolicyNetwork(1).train()
    scores = torch.tensor([1.0, 0.2])
    policy.layers = nn.Identity()
    torch.manual_seed(0)
    r = policy(scores.expand(200_000, 2))
    assert (r > 0.5).double().mean().item() == pytest.approx(scores.softmax(0)[0].item(), abs=0.005)


def test_the_context_of_several_layers_is_that_of_their_product():
    head = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    made = ConditionalHead(head, 3)
    made.renew_context()
    v = (head[2].weight @ head[0].weight).sum(0)
    torch.testing.assert_close(made.context, (v / v.norm()).detach())
    assert not made.context.requires_grad


def test_a_context_of_zeros_stays_finite():
    assert context_of([torch.zeros(3, 2)]).tolist() == [0, 0]


def test_personal_and_global_head_start_equal_and_the_context_is_drawn():
    head = ConditionalHead(nn.Linear(6, 3), 6)
    assert torch.equal(head.personal.weight, head.head.weight)
    assert head.personal.weight is not head.head.weight
    assert (head.context > 0).all()
    assert head.context.norm().item() == pytest.approx(1)


@pytest.mark.parametrize("head", [nn.Identity(), nn.Linear(4, 3), nn.Sequential(nn.Linear(6, 5), nn.Linear(4, 3))])
def test_a_classifier_that_gives_no_context_is_refused(head):
    with raises(ConfigError):
        ConditionalHead(head, 6)


# --- the whole method ---------------------------------------------------------------------------------------


def independent(start, data, cohorts, *, lr, rho, decay, lam, epochs):
    """FedCP with full batches in float64: the global parts, and every client's head and context."""
    w = {name: tensor.double() for name, tensor in start.items()}
    body = ("encoder.base.1.weight", "encoder.base.1.bias")
    policy = tuple(f"classifier.policy.layers.{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias"))
    shared = {name: w[name] for name in body + policy}
    head = (w["classifier.head.weight"], w["classifier.head.bias"])
    personal = dict.fromkeys(range(len(data)), (w["classifier.personal.weight"], w["classifier.personal.bias"]))
    contexts = dict.fromkeys(personal, w["classifier.context"])

    def features(x, w):
        return torch.tanh(x @ w[body[0]].T + w[body[1]])

    def objective(x, y, own, v, w):
        h = features(x, w)
        z = (h * v) @ w[policy[0]].T + w[policy[1]]
        z = (z - z.mean(1, keepdim=True)) / (z.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        scores = (z * w[policy[2]] + w[policy[3]]).clamp(min=0).view(len(x), 2, -1)
        share = torch.softmax(scores, 1)
        logits = share[:, 0] * h @ own[0].T + own[1] + share[:, 1] * h @ head[0].T + head[1]
        near = features(x, shared).detach()
        kernels = 0
        for a in (10, 15, 20, 50) if lam else ():
            for p, q, sign in ((h, h, 1), (near, near, 1), (h, near, -2)):
                kernels = kernels + sign * torch.exp(-(p.unsqueeze(1) - q).pow(2).sum(2) / (2 * a)).mean()
        return F.cross_entropy(logits, y) + lam * kernels

    for cohort in cohorts:
        n = sum(len(data[k][1]) for k in cohort)
        new = dict.fromkeys(shared, 0)
        new_head = [0, 0]
        for k in cohort:
            trained = [t.clone().requires_grad_() for t in (*shared.values(), *personal[k])]
            velocity = [0] * len(trained)
            for _ in range(epochs):
                value = objective(*data[k], trained[-2:], contexts[k], dict(zip(shared, trained)))
                for i, g in enumerate(torch.autograd.grad(value, trained)):
                    velocity[i] = rho * velocity[i] + g + decay * trained[i].detach()
                trained = [(t.detach() - lr * v).requires_grad_() for t, v in zip(trained, velocity)]
            trained = [t.detach() for t in trained]
            share = len(data[k][1]) / n
            for name, t in zip(shared, trained):
                new[name] = new[name] + share * t
            personal[k] = tuple(trained[-2:])
            new_head = [sum_ + share * (p + g) / 2 for sum_, p, g in zip(new_head, personal[k], head)]
            v = personal[k][0].sum(0)
            contexts[k] = v / v.norm()
        shared, head = new, tuple(new_head)
    return shared, head, personal, contexts


COHORTS = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]


@pytest.mark.parametrize("lam", [0.0, 5.0])
def test_rounds_of_partial_participation_against_an_independent_computation(go, without_noise, lam):
    sgd = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
    result = go(
        {"fedcp": {"lambda": lam}, HERE + "Cohorts": {"rounds": COHORTS}},
        **sgd, model=HERE + "tiny", rounds=4, local_epochs=2, batch_size=2000, partition="dirichlet", alpha=0.5,
        samples=300,  # the kernels below are of every two samples
    )  # fmt: skip
    digits = load_dataset("digits")
    parts = load_partition(result.directory / "partition.json", digits).train
    assert len({len(part) for part in parts}) > 1
    data = [(digits.train.gather(p).flatten(1).double(), digits.train.labels[p]) for p in parts]
    shared, head, personal, contexts = independent(
        SEEN["start"], data, COHORTS, lr=0.1, rho=0.5, decay=0.01, lam=lam, epochs=2
    )
    after = result.model.state_dict()

    def close(found, expected):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-5)

    for name, tensor in shared.items():
        close(after[name], tensor)
    close(after["classifier.head.weight"], head[0])
    close(after["classifier.head.bias"], head[1])
    for k in range(3):
        own = kept(result, k)
        assert set(own) == {"personal.weight", "personal.bias", "context"}
        close(own["personal.weight"], personal[k][0])
        close(own["personal.bias"], personal[k][1])
        close(own["context"], contexts[k])


def test_the_first_step_has_no_mmd_and_the_term_is_logged(go):
    result = go({"fedcp": {}}, model=HERE + "tiny", rounds=1, batch_size=2000)
    assert lines(result)[0]["losses"]["fedcp.mmd"] == pytest.approx(0, abs=1e-6)
    result = go({"fedcp": {}}, model=HERE + "tiny", rounds=1, batch_size=32, local_epochs=2)
    assert lines(result)[0]["losses"]["fedcp.mmd"] > 1e-5
    assert set(lines(go({"fedcp": {"lambda": 0.0}}, rounds=1))[0]["losses"]) == {"task"}


def test_lambda_keeps_features_near_the_global_encoders(go):
    free, held = (
        lines(go({"fedcp": {"lambda": lam}}, rounds=1, local_epochs=4, lr=0.01, model=HERE + "tiny"))[0]
        for lam in (1e-6, 5.0)
    )
    assert held["losses"]["fedcp.mmd"] < 0.5 * free["losses"]["fedcp.mmd"]


def test_the_upload_is_the_mean_of_the_trained_and_the_received_head(go):
    result = go({"fedcp": {}, HERE + "Uploads": {}}, rounds=1)
    for update, received in zip(SEEN["updates"], SEEN["global"]):
        own = kept(result, update.client)
        for name in ("weight", "bias"):
            mean = 0.5 * own[f"personal.{name}"] + 0.5 * received[f"classifier.head.{name}"]
            assert torch.equal(update.model[f"classifier.head.{name}"], mean)
            assert not torch.equal(own[f"personal.{name}"], received[f"classifier.head.{name}"])
        assert not [name for name in update.model if "personal" in name or "context" in name]


def test_what_travels_is_encoder_head_and_policy(go):
    result = go({"fedcp": {}}, model=HERE + "tiny", clients=2, rounds=1)
    floats = (64 * 6 + 6) + (6 * 10 + 10) + (2 * 6**2 + 6 * 6)
    assert lines(result)[0]["bytes"]["by_plugin"]["model"] == {"down": 2 * 4 * floats, "up": 2 * 4 * floats}


def test_batch_norm_statistics_are_the_mean_by_samples(go):
    result = go({"fedcp": {}, HERE + "Uploads": {}}, model=HERE + "with_batch_norm", partition="dirichlet", rounds=1)
    updates, after = SEEN["updates"], result.model.state_dict()
    n = sum(update.samples for update in updates)
    for name in ("running_mean", "running_var"):
        mean = sum(u.samples / n * u.model[f"encoder.base.2.{name}"].double() for u in updates)
        torch.testing.assert_close(after[f"encoder.base.2.{name}"].double(), mean, rtol=1e-6, atol=1e-7)
    assert after["encoder.base.2.num_batches_tracked"] == max(
        u.model["encoder.base.2.num_batches_tracked"] for u in updates
    )


# --- evaluation, repetition, resumption ---------------------------------------------------------------------

SKEWED = {"partition": "classes", "classes_per_client": 2, "clients": 5, "client_test_fraction": 0.25}


def test_it_reports_the_personalised_protocol(go):
    result = go({"fedcp": {}}, **SKEWED, rounds=4, local_epochs=2, lr=0.05, samples=None)
    assert result.metrics["global"] is None
    assert "stay on the clients" in result.summary["metrics"]["global_reason"]
    assert result.metrics["personal"]["accuracy"] > 0.85
    assert result.metrics["personal"]["untrained"] == 0
    assert result.metrics["personal"]["accuracy"] > result.metrics["personal_global"]["accuracy"] + 0.3
    again = fedcore.evaluate_run(result.directory, allow_code=True)
    assert again["personal"] == result.metrics["personal"], "no noise in an evaluation"


def test_clients_that_never_took_part_are_evaluated_with_the_first_head(go):
    result = go({"fedcp": {}, HERE + "Cohorts": {"rounds": [[0], [1]]}}, **SKEWED)
    assert result.metrics["personal"]["untrained"] == 3
    assert kept(result, 2) == {}


def test_evaluation_takes_the_context_of_the_trained_head(go, monkeypatch):
    def noting(self, h):
        if not self.training:
            SEEN.setdefault("contexts", []).append((self.context.clone(), self.personal.weight.detach().clone()))
        return original(self, h)

    original = ConditionalHead.forward
    monkeypatch.setattr(ConditionalHead, "forward", noting)
    result = go({"fedcp": {"lambda": 0}}, **SKEWED, rounds=1)
    trained = [kept(result, k)["personal.weight"] for k in range(5)]
    evaluated = [(v, w) for v, w in SEEN["contexts"] if any(torch.equal(w, own) for own in trained)]
    assert evaluated
    for v, weight in evaluated:
        torch.testing.assert_close(v, F.normalize(weight.sum(0), dim=0))


def test_the_policy_starts_alike_whatever_stands_before_it(go):
    """Its weights are drawn from the seed and their purpose, not from where another plugin left off."""
    starts = []
    for plugins in ({"fedcp": {}}, {HERE + "Uploads": {}, "fedcp": {"lambda": 0}}):
        SEEN.clear()
        go({**plugins, HERE + "Cohorts": {"rounds": [[0]]}}, rounds=1)
        starts.append(SEEN["start"])
    assert all(torch.equal(tensor, starts[1][name]) for name, tensor in starts[0].items())


@pytest.mark.parametrize(("lam", "looked_at"), [(5.0, {"client"}), (0.0, set())])
def test_a_step_neither_waits_for_the_device_nor_looks_at_more_than_it_needs(go, lam, looked_at):
    with steps_without_host_sync() as seen:
        go({"fedcp": {"lambda": lam}})
    assert seen
    assert all(found == looked_at for found in seen)


# --- options and company ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_lambda_trains_otherwise(go):
    assert len({model_bytes(go({"fedcp": {"lambda": lam}})) for lam in (0, 1, 5)}) == 3


class Keeper(Plugin):
    """Keeps parameters on the clients, too."""

    @hookimpl
    def personal_parameters(self, model):
        return ["classifier.context"]


class Deep(Plugin):
    """Makes the classifier two linear layers."""

    @hookimpl
    def configure_model(self, model):
        model.classifier = nn.Sequential(nn.Linear(model.feature_dim, 7), nn.ReLU(), nn.Linear(7, model.num_classes))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Keeper, ()),
        ("uscc", ("'fedcp'",)),
        ("ccvr", ("'fedcp'",)),
    ],
)
def test_refused(go, other, named):
    if isinstance(other, str):
        installed(other)
    with raises(PluginConflictError, *named):
        go({"fedcp": {}, other: {}})


def test_a_projection_head_goes_before_it(go):
    installed("moon")
    with raises(PluginConflictError):
        go({"fedcp": {}, "moon": {}})
    result = go({"moon": {}, "fedcp": {}})
    assert set(lines(result)[1]["losses"]) == {"task", "moon.contrast", "fedcp.mmd"}
    assert result.model.state_dict()["classifier.head.weight"].shape == (10, 256)


def test_a_classifier_of_two_layers(go):
    result = go({HERE + "Deep": {}, "fedcp": {}}, rounds=1)
    own = kept(result, 0)
    v = (own["personal.2.weight"] @ own["personal.0.weight"]).sum(0)
    torch.testing.assert_close(own["context"], v / v.norm())


def test_personal_heads_and_fedprox(go):
    installed("fedprox")
    result = go({"fedcp": {}, "fedprox": {"mu": 0.1}})
    assert set(lines(result)[1]["losses"]) == {"task", "fedcp.mmd", "fedprox.proximal"}
