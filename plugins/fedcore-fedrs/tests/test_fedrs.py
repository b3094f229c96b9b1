"""FedRS: the hand cases, the gradient of the restricted softmax, and what counts as a missing class."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcore
from fedcore import Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore.data import Dataset, ResidentSamples, load_dataset
from fedcore_fedrs import FedRS, frequency_factors, missing_factors, restricted_cross_entropy
from fedcore_testing import (
    OwnTaskLoss,
    client_arrays,
    federations,
    linear,
    mean_by_hand,
    model_bytes,
    partition_of,
    records,
    sgd_by_hand,
    steps_without_host_sync,
    weights,
)
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 5}
go = federations(samples=300)


# --- the hand cases ----------------------------------------------------------------------------------------------

Z, COUNTS = (2.0, 1.0, -1.0), (6, 2, 0)
CASES = {  # factors, loss of a sample of class 0, p_2, gradient in z_2
    "missing": ((1.0, 1.0, 0.5), 0.3715390, 0.0566117, 0.0283059),
    "frequency": ((1.0, 2 / 3, 0.5), 0.2969010, 0.0609988, 0.0304994),
}


@pytest.mark.parametrize("restrict", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_hand_case(restrict, dtype):
    factors, loss, p, gradient = CASES[restrict]
    found = {"missing": missing_factors, "frequency": frequency_factors}[restrict](torch.tensor(COUNTS), 0.5)
    torch.testing.assert_close(found, torch.tensor(factors))
    z = torch.tensor([Z], dtype=dtype, requires_grad=True)
    value = restricted_cross_entropy(z, torch.tensor([0]), found.to(dtype))
    value.backward()
    assert value.item() == pytest.approx(loss, abs=2e-7)
    assert (z * found).softmax(1)[0, 2].item() == pytest.approx(p, abs=2e-7)
    assert z.grad[0, 2].item() == pytest.approx(gradient, abs=2e-7)
    plain = torch.tensor([Z], dtype=dtype, requires_grad=True)
    F.cross_entropy(plain, torch.tensor([0])).backward()
    assert plain.grad[0, 2].item() == pytest.approx(0.0351190, abs=2e-7)


class Logits(nn.Module):
    """Logits are the parameter, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.tensor(Z))

    def forward(self, x):
        return self.z.expand(len(x), -1)


class IsItsLogits(SplitModel):
    def make_classifier(self, feature_dim):
        return nn.Identity()


def fixed_logits(num_classes, input_shape):
    return IsItsLogits(Logits(), 3, num_classes)


def six_and_two(data_dir=None):
    def samples(labels):
        return ResidentSamples(torch.zeros(len(labels), 1, 1, 1), torch.tensor(labels), [0.0], [1.0])

    return Dataset("toy", samples([0] * 6 + [1] * 2), samples([0, 1, 2, 2]), num_classes=3, input_shape=(1, 1, 1))


TOY = {
    "dataset": six_and_two,
    "model": fixed_logits,
    "partition": "iid",
    "clients": 1,
    "rounds": 1,
    "batch_size": 8,
    "lr": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


@pytest.mark.parametrize("restrict", CASES)
def test_the_hand_case_in_the_round_loop(go, restrict):
    """One step at lr 1 on all eight samples: z_2's gradient is the same for each of them, and so is z_2's move."""
    factors, loss, _, gradient = CASES[restrict]
    result = go({"fedrs": {"restrict": restrict}}, **TOY)
    assert weights(result)["encoder.base.z"][2].item() == pytest.approx(-1 - gradient, abs=5e-7)
    of_class_1 = loss + 2 * factors[0] - 1 * factors[1]  # log-sum-exp is the same
    assert records(result)[0]["losses"] == {"task": pytest.approx((6 * loss + 2 * of_class_1) / 8, abs=5e-7)}
    plain = go({}, **TOY)
    assert weights(plain)["encoder.base.z"][2].item() == pytest.approx(-1 - 0.0351190, abs=5e-7)


def test_a_class_that_is_missing_in_a_batch_only_is_not_restricted(go):
    """Batches of one hold one class each; the factors are those of the whole training part."""
    found = weights(go({"fedrs": {}}, **{**TOY, "batch_size": 1, "lr": 0.1}))["encoder.base.z"].double().numpy()
    orders = set()
    for at_first in range(8):
        for at_second in range(at_first + 1, 8):
            labels = [1 if i in (at_first, at_second) else 0 for i in range(8)]
            z, a = np.array(Z), np.array([1.0, 1.0, 0.5])
            for y in labels:
                e = np.exp(a * z)
                z = z - 0.1 * a * (e / e.sum() - np.eye(3)[y])
            orders.add(tuple(np.round(z, 4)))
    assert tuple(np.round(found, 4)) in orders


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_against_numpy(dtype):
    rng = np.random.default_rng(0)
    z, y = 3 * rng.standard_normal((7, 5)), rng.integers(0, 5, 7)
    a = np.array([1.0, 0.3, 0.0, 0.8, 1.0])
    expected, gradient = 0.0, np.zeros_like(z)
    for i in range(7):
        p = np.exp(a * z[i]) / np.exp(a * z[i]).sum()
        expected -= np.log(p[y[i]]) / 7
        gradient[i] = a * (p - np.eye(5)[y[i]]) / 7
    logits = torch.tensor(z, dtype=dtype, requires_grad=True)
    value = restricted_cross_entropy(logits, torch.tensor(y), torch.tensor(a, dtype=dtype))
    value.backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert value.item() == pytest.approx(expected, rel=tolerance)
    np.testing.assert_allclose(logits.grad, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_factors_against_numpy(alpha):
    counts = np.array([0, 1, 7, 0, 30])
    tensor = torch.tensor(counts)
    for found, expected in (
        (missing_factors(tensor, alpha), np.where(counts > 0, 1.0, alpha)),
        (frequency_factors(tensor, alpha), alpha + (1 - alpha) * counts / counts.max()),
    ):
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_client_with_one_class_or_one_sample():
    assert missing_factors(torch.tensor([0, 1, 0]), 0.2).tolist() == pytest.approx([0.2, 1.0, 0.2])
    assert frequency_factors(torch.tensor([0, 1, 0]), 0.2).tolist() == pytest.approx([0.2, 1.0, 0.2])


def test_restricting_a_negative_logit_raises_its_probability_and_shrinks_its_gradient():
    z = torch.tensor([Z], dtype=torch.float64)
    probabilities, gradients = [], []
    for alpha in (1.0, 0.5, 0.1, 0.0):
        logits = z.clone().requires_grad_()
        factors = missing_factors(torch.tensor(COUNTS), alpha).double()
        restricted_cross_entropy(logits, torch.tensor([0]), factors).backward()
        probabilities.append((z * factors).softmax(1)[0, 2].item())
        gradients.append(logits.grad[0, 2].item())
    assert probabilities == sorted(probabilities)
    assert gradients == sorted(gradients, reverse=True)
    assert gradients[-1] == 0.0


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_logits_stay_finite(scale):
    z = (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    value = restricted_cross_entropy(z, torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 0.5, 0.0]))
    value.backward()
    assert value.isfinite()
    assert z.grad.isfinite().all()


# --- a whole run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"alpha": 0.3}, {"alpha": 0.6, "restrict": "frequency"}], ids=str)
def test_a_run_is_the_method_in_numpy(go, options):
    """Two rounds of full batches with momentum and weight decay, part of the clients' samples held out."""
    result = go(
        {"fedrs": options},
        **SKEWED,
        model=linear,
        local_epochs=3,
        batch_size=5000,
        lr=0.1,
        weight_decay=1e-2,
        client_test_fraction=0.3,
    )
    start = go({"fedrs": options}, **SKEWED, model=linear, rounds=1, lr=1e-30)
    clients = client_arrays(result)

    def by_hand(alpha):
        def gradient(own, x, y):
            counts = y.sum(0)
            a = alpha + (1 - alpha) * counts / counts.max()
            if options.get("restrict") != "frequency":
                a = np.where(counts > 0, 1.0, alpha)
            z = a * (x @ own["classifier.weight"].T + own["classifier.bias"])
            p = np.exp(z - z.max(1, keepdims=True))
            g = a * (p / p.sum(1, keepdims=True) - y) / len(x)
            return {"classifier.weight": g.T @ x, "classifier.bias": g.sum(0)}

        w = {name: tensor.double().numpy() for name, tensor in weights(start).items()}
        for _ in range(2):
            local = [sgd_by_hand(gradient, w, x, y, 3, lr=0.1) for x, y in clients]
            w = mean_by_hand(local, [len(x) for x, _ in clients])
        return w

    def distance(expected):
        return max(np.abs(weights(result)[name].numpy() - value).max() for name, value in expected.items())

    assert any((y.sum(0) == 0).any() for _, y in clients)
    assert distance(by_hand(options["alpha"])) < 1e-5
    assert distance(by_hand(1.0)) > 1e-3


def test_a_client_that_has_every_class_trains_as_in_fedavg(go):
    options = {"clients": 1, "partition": "iid", "rounds": 1}
    restricted, plain = weights(go({"fedrs": {"alpha": 0.0}}, **options)), weights(go({}, **options))
    assert all(torch.equal(restricted[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"alpha": 0.1}, {"alpha": 1.0}, {"restrict": "frequency"}]
    found = [model_bytes(go({"fedrs": change}, **SKEWED)) for change in changes]
    assert len(set(found)) == len(changes)


@pytest.mark.parametrize(("decay", "shrinks"), [(0.0, False), (0.1, True)])
def test_alpha_0_freezes_the_rows_of_missing_classes_but_for_weight_decay(go, decay, shrinks):
    options = {"clients": 1, "partition": low_digits, "rounds": 1, "weight_decay": decay}
    before = weights(go({}, **options, lr=1e-30))
    after = weights(go({"fedrs": {"alpha": 0.0}}, **options))
    for name in ("classifier.weight", "classifier.bias"):  # the bias of a missing class is restricted, too
        assert not torch.equal(after[name][:4], before[name][:4])
        assert torch.equal(after[name][4:], before[name][4:]) != shrinks
        assert (after[name][4:].abs() <= before[name][4:].abs()).all()


def low_digits(labels, num_clients, **_):
    return np.array_split(np.flatnonzero(labels < 4), num_clients)


class Factors(FedRS):
    """FedRS that sends its factors up."""

    @hookimpl
    def end_local(self, client):
        SEEN[client.id] = client.scratch["factors"].tolist()


SEEN: dict[int, list[float]] = {}


def test_missing_is_what_the_training_part_lacks_whatever_is_held_out(go):
    SEEN.clear()
    options = {"partition": "dirichlet", "alpha": 0.1, "client_test_fraction": 0.5, "clients": 6}
    result = go({Factors: {"alpha": 0.25}}, **options, rounds=1)
    labels = load_dataset("digits", None).train.labels
    parts = partition_of(result)
    for client, part in enumerate(parts.train):
        held = {int(label) for label in labels[part]}
        assert SEEN[client] == [1.0 if c in held else 0.25 for c in range(10)]
    assert len(SEEN) == 6


def test_evaluation_uses_unscaled_logits(go):
    result = go({"fedrs": {"alpha": 0.1}}, **SKEWED, client_test_fraction=0.2)
    test = load_dataset("digits", None).test
    with torch.no_grad():
        _, logits = result.model(test.gather(torch.arange(len(test))))
    assert result.metrics["global"]["accuracy"] == (logits.argmax(1) == test.labels).sum().item() / len(test)
    assert list(weights(result)) == list(weights(go({}, **SKEWED, rounds=1)))
    assert "global_local" in result.metrics
    assert "personal" not in result.metrics


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_step_does_not_wait_for_the_device(go, alpha):
    with steps_without_host_sync() as looked:
        go({"fedrs": {"alpha": alpha}}, **SKEWED)
    assert max(looked, key=len) == (set() if alpha == 1 else {"client"})


def test_runs_in_bf16(go):
    assert records(go({"fedrs": {}}, **SKEWED, precision="bf16", rounds=1))[0]["losses"]["task"] > 0


# --- options and company -----------------------------------------------------------------------------------------


def test_another_task_loss_is_refused(go):
    with raises(PluginConflictError, "'fedrs'", "'owntaskloss'", "task_loss"):
        go({"fedrs": {}, OwnTaskLoss: {}})


class Small(Plugin):
    """Adds a term on the logits, and notes them."""

    @hookimpl
    def local_loss(self, step):
        scale = (step.logits.detach() - step.model.classifier(step.features.detach()).detach()).abs().max()
        UNSCALED.append(scale)
        return fedcore.Loss(step.logits.square().mean(), weight=1e-3)


UNSCALED: list[torch.Tensor] = []


def test_other_terms_see_unscaled_logits(go):
    UNSCALED.clear()
    result = go({"fedrs": {"alpha": 0.1}, Small: {}}, **SKEWED, rounds=1)
    assert set(records(result)[0]["losses"]) == {"task", "small"}
    assert UNSCALED
    assert all(scale.item() < 1e-5 for scale in UNSCALED)
