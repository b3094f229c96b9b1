"""L_e and L_c, against NumPy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedcore_fdcl import classifier_loss, encoder_loss


def reference(name, local, received, previous, tau):
    """Sample by sample, as printed in Algorithm 2, with the minus sign."""

    def s(a, b):
        return math.exp(float(a @ b) / (max(np.linalg.norm(a), 1e-8) * max(np.linalg.norm(b), 1e-8)) / tau)

    values = []
    for pl, pg, pp in zip(local, received, previous):
        top = s(pl, pg) if name == "encoder" else s(pl, pp)
        values.append(-math.log(top / (s(pl, pg) + s(pl, pp))))
    return sum(values) / len(values)


FUNCTIONS = {"encoder": encoder_loss, "classifier": classifier_loss}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 3), (32, 10)])
def test_losses_are_the_papers(name, tau, shape):
    rng = np.random.default_rng(shape[0])
    arrays = [rng.normal(size=shape) for _ in range(3)]
    arrays[2][0] = 0.0  # a dead encoder's features: norm clamped
    value = FUNCTIONS[name](*(torch.from_numpy(a) for a in arrays), temperature=tau)
    assert value.shape == ()
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(reference(name, *arrays, tau), rel=1e-10)


def test_the_two_losses_pull_in_opposite_directions():
    local = torch.tensor([[1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    received, previous = (torch.tensor([v], dtype=torch.float64) for v in ([1.0, 0.0], [0.0, 1.0]))

    def after_a_step(loss):
        (gradient,) = torch.autograd.grad(loss(local, received, previous), local)
        moved = local.detach() - 0.1 * gradient
        return tuple(float(torch.cosine_similarity(moved, other)) for other in (received, previous))

    start = math.sqrt(0.5)
    to_global, to_previous = after_a_step(encoder_loss)
    assert to_global > start + 0.01
    assert to_previous < start - 0.01
    to_global, to_previous = after_a_step(classifier_loss)
    assert to_global < start - 0.01
    assert to_previous > start + 0.01


def test_equal_models_give_log_2_and_no_gradient():
    local, other = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    for loss in FUNCTIONS.values():
        value = loss(local, other, other)
        assert value.item() == pytest.approx(math.log(2))
        assert torch.autograd.grad(value, local)[0].abs().max() < 1e-7


def test_only_the_local_outputs_are_trained():
    local, received, previous = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    for loss in FUNCTIONS.values():
        loss(local, received.detach(), previous.detach()).backward()
    assert local.grad is not None
