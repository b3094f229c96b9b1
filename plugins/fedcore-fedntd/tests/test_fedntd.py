"""FedNTD: the hand case, value and gradient against NumPy, what the true class has no part in, a whole run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedcore import hookimpl
from fedcore.data import as_dataset, load_dataset
from fedcore_fedntd import FedNTD, not_true_distillation
from fedcore_testing import (
    federations,
    installed,
    model_bytes,
    records,
    steps_without_host_sync,
)
from tests.sentences import warns

go = federations()
SEEN: list[dict] = []


# --- the equation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_hand_case(dtype):
    """Label 1: q~_l = (1, 3) / 4 and q~_g = (1, 1) / 2; the loss is 1/2 log 2 + 1/2 log(2/3) = log 2 - log(3) / 2."""
    local = torch.tensor([[0.0, 50.0, math.log(3)]], dtype=dtype, requires_grad=True)
    received = torch.tensor([[4.0, -9.0, 4.0]], dtype=dtype)
    value = not_true_distillation(local, received, torch.tensor([1]))
    value.backward()
    assert value.dtype == dtype
    assert value.item() == pytest.approx(math.log(2) - math.log(3) / 2, abs=1e-6)
    np.testing.assert_allclose(local.grad, [[-0.25, 0.0, 0.25]], atol=1e-6)  # q~_l - q~_g


def reference(z, g, y, tau):
    """The mean over samples by loops, with q~ on the C - 1 other classes."""
    total, gradient = 0.0, np.zeros_like(z)
    for i in range(len(z)):
        others = [c for c in range(z.shape[1]) if c != y[i]]
        q_l, q_g = (np.exp(a[i, others] / tau) / np.exp(a[i, others] / tau).sum() for a in (z, g))
        total += sum(p * np.log(p / q) for p, q in zip(q_g, q_l)) / len(z)
        gradient[i, others] = (q_l - q_g) / tau / len(z)
    return total, gradient


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_value_and_gradient_against_numpy(tau):
    rng = np.random.default_rng(0)
    z, g, y = rng.standard_normal((7, 5)), rng.standard_normal((7, 5)), rng.integers(0, 5, 7)
    local = torch.tensor(z, requires_grad=True)
    value = not_true_distillation(local, torch.tensor(g), torch.tensor(y), tau)
    value.backward()
    expected, gradient = reference(z, g, y, tau)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(local.grad, gradient, rtol=1e-10, atol=1e-15)


def test_the_true_class_has_no_part_in_it():
    local, received, labels = torch.randn(6, 4), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    true = torch.nn.functional.one_hot(labels, 4) * 17.0
    value = not_true_distillation(local, received, labels)
    torch.testing.assert_close(not_true_distillation(local + true, received - true, labels), value)


def test_equal_models_and_two_classes_give_no_gradient():
    z = torch.randn(6, 4, requires_grad=True)
    not_true_distillation(z, z.detach().clone(), torch.arange(6) % 4).backward()
    torch.testing.assert_close(z.grad, torch.zeros_like(z), rtol=0, atol=1e-7)
    two = torch.randn(6, 2, requires_grad=True)
    value = not_true_distillation(two, torch.randn(6, 2), torch.arange(6) % 2)
    value.backward()
    assert value.item() == 0.0
    assert (two.grad == 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_logits_stay_finite(scale):
    z, g = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0)) * scale
    z.requires_grad_()
    value = not_true_distillation(z, g, torch.arange(7) % 5, 0.1)
    value.backward()
    assert value.isfinite()
    assert z.grad.isfinite().all()


# --- in the round loop -------------------------------------------------------------------------------------------


class Watched(FedNTD):
    """FedNTD that notes the term of every batch beside the reference on both models' logits."""

    @hookimpl
    def local_loss(self, step):
        loss = super().local_loss(step)
        with torch.no_grad():
            z, g = (model(step.x).logits.double().numpy() for model in (step.model, step.global_model))
        expected, _ = reference(z, g, step.y.numpy(), self.options.temperature)
        training = any(module.training for module in step.global_model.modules())
        SEEN.append({"value": loss.value.item(), "expected": expected, "weight": loss.weight, "training": training})
        return loss


def test_the_term_is_that_of_the_model_in_training_and_the_one_received(go):
    SEEN.clear()
    go({Watched: {"beta": 0.3, "temperature": 2.0}}, local_epochs=2)
    assert len(SEEN) > 10
    for entry in SEEN:
        assert entry["value"] == pytest.approx(entry["expected"], rel=1e-3, abs=1e-6)
        assert entry["weight"] == 0.3
        assert not entry["training"]
    assert max(entry["value"] for entry in SEEN) > 1e-3


def test_a_larger_beta_keeps_the_client_nearer_to_what_it_received(go):
    kept = [
        records(go({"fedntd": {"beta": beta}}, rounds=1, clients=1, local_epochs=2))[0]["losses"]["fedntd.not_true"]
        for beta in (1e-6, 3.0, 30.0)
    ]
    assert kept[0] > kept[1] > kept[2] > 0


def parity(data_dir):
    digits = load_dataset("digits")
    arrays = [array for part in (digits.train, digits.test) for array in (part.images.numpy(), part.labels.numpy() % 2)]
    return as_dataset(arrays, "parity")


def test_with_two_classes_it_is_fedavg_to_the_bit_and_a_note_says_so(go):
    two = {"dataset": parity}
    with warns(RuntimeWarning, "fedntd", "two classes"):
        result = go({"fedntd": {}}, **two)
    assert model_bytes(result) == model_bytes(go({}, **two))


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"beta": 0.1}, {"temperature": 3.0}, {"beta": 0.0}]
    assert len({model_bytes(go({"fedntd": change})) for change in changes}) == len(changes)


def test_a_step_does_not_wait_for_the_device(go):
    with steps_without_host_sync() as looked:
        go({"fedntd": {}})
    assert max(looked, key=len) == {"client"}


def test_beside_another_task_loss(go):
    result = go({"fedntd": {}, installed("fedlc"): {}})
    assert set(records(result)[0]["losses"]) == {"task", "fedntd.not_true"}
