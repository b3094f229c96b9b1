"""FedLC: the hand case, value and gradient against NumPy, classes that a client does not have, a whole run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import PluginConflictError
from fedcore_fedlc import calibrated_cross_entropy, margins
from fedcore_testing import (
    OwnTaskLoss,
    client_arrays,
    federations,
    linear,
    mean_by_hand,
    model_bytes,
    sgd_by_hand,
    steps_without_host_sync,
    weights,
)
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 5}
go = federations()


# --- the equation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_hand_case(dtype):
    """Counts 16, 1, 0 and tau 2: margins 1, 2, infinite; f - m is (1, -1), so p = (0.8808, 0.1192, 0)."""
    found = margins(torch.tensor([16, 1, 0]), 2.0)
    f = torch.tensor([[2.0, 1.0, 7.0]], dtype=dtype, requires_grad=True)
    value = calibrated_cross_entropy(f, torch.tensor([0]), found.to(dtype))
    value.backward()
    assert value.item() == pytest.approx(np.log1p(np.exp(-2)), rel=1e-6)
    np.testing.assert_allclose(f.grad, [[-0.1192029, 0.1192029, 0.0]], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tau", [0.1, 1.0, 5.0])
def test_value_and_gradient_against_numpy(dtype, tau):
    rng = np.random.default_rng(0)
    f, counts = 3 * rng.standard_normal((7, 5)), np.array([40, 0, 3, 1, 700])
    y = rng.choice([0, 2, 3, 4], 7)
    held = counts > 0
    shifted = f[:, held] - tau * counts[held] ** -0.25
    p = np.zeros_like(f)
    p[:, held] = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    logits = torch.tensor(f, dtype=dtype, requires_grad=True)
    value = calibrated_cross_entropy(logits, torch.tensor(y), margins(torch.tensor(counts), tau).to(dtype))
    value.backward()
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5  # margins are float32
    assert value.item() == pytest.approx(-np.log(p[range(7), y]).mean(), rel=tolerance)
    np.testing.assert_allclose(logits.grad, (p - np.eye(5)[y]) / 7, rtol=tolerance, atol=tolerance)
    assert (logits.grad[:, 1] == 0).all(), "a class that the client does not have is not pushed away"


def test_a_rare_class_needs_a_larger_logit_for_the_same_loss():
    """The margin falls with the count: the pairwise margin of the paper, tau (n_y^-1/4 - n_c^-1/4)."""
    found = margins(torch.tensor([1, 16, 256, 10_000]), 1.0)
    assert found.tolist() == pytest.approx([1.0, 0.5, 0.25, 0.1])
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 3])
    losses = [calibrated_cross_entropy(logits[i : i + 1], labels[i : i + 1], found).item() for i in (0, 1)]
    assert losses[0] > np.log(4) > losses[1]


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_logits_stay_finite(scale):
    f = (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    value = calibrated_cross_entropy(f, torch.tensor([0, 1, 1, 0]), margins(torch.tensor([5, 9, 0]), 1.0))
    value.backward()
    assert value.isfinite()
    assert f.grad.isfinite().all()


# --- a whole run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 1])
def test_a_run_is_the_method_in_numpy(go, least):
    """Two rounds of full batches with momentum and weight decay."""
    options = {**SKEWED, "model": linear, "local_epochs": 3, "batch_size": 5000, "lr": 0.1, "weight_decay": 1e-2}
    result = go({"fedlc": {"tau": 0.7, "least": least}}, **options)
    start = weights(go({"fedlc": {}}, **{**options, "rounds": 1, "lr": 1e-30}))
    clients = client_arrays(result)

    def by_hand(tau):
        def gradient(own, x, y):
            held = y.sum(0) > 0 if tau and not least else np.ones(10, dtype=bool)
            margin = tau * np.maximum(y.sum(0), 1) ** -0.25
            z = np.where(held, x @ own["classifier.weight"].T + own["classifier.bias"] - margin, -np.inf)
            p = np.exp(z - z.max(1, keepdims=True))
            g = (p / p.sum(1, keepdims=True) - y) / len(x)
            return {"classifier.weight": g.T @ x, "classifier.bias": g.sum(0)}

        w = {name: tensor.double().numpy() for name, tensor in start.items()}
        for _ in range(2):
            local = [sgd_by_hand(gradient, w, x, y, 3, lr=0.1) for x, y in clients]
            w = mean_by_hand(local, [len(x) for x, _ in clients])
        return max(np.abs(weights(result)[name].numpy() - value).max() for name, value in w.items())

    assert by_hand(0.7) < 1e-5
    assert by_hand(0.0) > 1e-3


def test_equally_frequent_classes_are_fedavg_but_for_rounding(go):
    """Equal margins leave the softmax as it is."""
    equal = {"clients": 1, "partition": ten_of_each, "rounds": 1}
    calibrated, plain = weights(go({"fedlc": {"tau": 3.0}}, **equal)), weights(go({}, **equal))
    for name, tensor in plain.items():
        torch.testing.assert_close(calibrated[name], tensor, rtol=1e-5, atol=1e-6)


def ten_of_each(labels, num_clients, **_):
    return [np.concatenate([np.flatnonzero(labels == c)[:10] for c in range(10)])]


def test_rows_of_missing_classes_do_not_move(go):
    options = {"clients": 1, "partition": low_digits, "rounds": 1, "weight_decay": 0.0}
    before, after = weights(go({}, **options, lr=1e-30)), weights(go({"fedlc": {}}, **options))
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(after[name][4:], before[name][4:])
        assert not torch.equal(after[name][:4], before[name][:4])


def low_digits(labels, num_clients, **_):
    return np.array_split(np.flatnonzero(labels < 4), num_clients)


def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"tau": 0.1}, {"tau": 0.0}, {"least": 1}, {"least": 50}]
    found = [model_bytes(go({"fedlc": change}, **SKEWED)) for change in changes]
    assert len(set(found)) == len(changes)


@pytest.mark.parametrize("tau", [1.0, 0.0])
def test_a_step_does_not_wait_for_the_device(go, tau):
    with steps_without_host_sync() as looked:
        go({"fedlc": {"tau": tau}}, **SKEWED)
    assert max(looked, key=len) == (set() if tau == 0 else {"client"})


def test_another_task_loss_is_refused(go):
    with raises(PluginConflictError, "'fedlc'", "'owntaskloss'", "task_loss"):
        go({"fedlc": {}, OwnTaskLoss: {}})
