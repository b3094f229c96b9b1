"""FedProx: the hand case, the gradient, what mu = 0 means, and what the term leaves alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedcore_fedprox import FedProx, FedProxOptions
from fedcore_testing import federations, model_bytes, records, with_batch_norm

go = federations(local_epochs=2)


def term(mu, parameters, reference):
    """Return the hook's Loss for these parameters."""
    step = SimpleNamespace(parameters=parameters, reference=reference)
    return FedProx(FedProxOptions(mu=mu)).local_loss(step)


# --- the equation ------------------------------------------------------------------------------------------------


def local_training(centre, mu, *, lr=0.5, steps=2):
    """Minimise |w - centre|^2 / 2 + mu/2 |w - w_t|^2 from w_t = 0 by two steps of SGD, rate 0.5."""
    w, w_t = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    optimizer = torch.optim.SGD([w], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = term(mu, [w], [w_t])
        total = 0.5 * (w - torch.tensor(centre)).square().sum()
        (total if loss is None or loss.value is None else total + loss.weight * loss.value).backward()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize(
    ("mu", "first", "second", "mean"),
    [(1.0, [1.0, 0.0], [0.0, 2.0], [0.25, 1.5]), (0.0, [1.5, 0.0], [0.0, 3.0], [0.375, 2.25])],
)
def test_the_toy_by_hand(mu, first, second, mean):
    y_1, y_2 = local_training([2.0, 0.0], mu), local_training([0.0, 4.0], mu)
    assert y_1.tolist() == first
    assert y_2.tolist() == second
    assert ((y_1 + 3 * y_2) / 4).tolist() == mean


@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_extreme_distances_stay_finite(scale):
    w = (torch.randn(4) * scale).requires_grad_()
    loss = term(1.0, [w], [-w.detach()])
    loss.value.backward()
    assert torch.isfinite(loss.value)
    torch.testing.assert_close(w.grad, 2 * w.detach())


@pytest.mark.parametrize(
    ("momentum", "strength", "stable"),
    [(0.0, 1.9, True), (0.0, 2.1, False), (0.9, 3.7, True), (0.9, 3.9, False)],
)
def test_stability_needs_lr_times_mu_below_twice_one_plus_momentum(momentum, strength, stable):
    w, w_t = nn.Parameter(torch.ones(1, dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=momentum)
    for _ in range(400):
        optimizer.zero_grad()
        loss = term(strength / 0.1, [w], [w_t])
        (loss.weight * loss.value).backward()
        optimizer.step()
    assert (abs(w.item()) < 1e-3) == stable
    assert (abs(w.item()) > 1e3) == (not stable)


# --- in the round loop -------------------------------------------------------------------------------------------


def test_mu_changes_the_trajectory_and_is_logged_apart_from_the_task(go):
    result = go({"fedprox": {"mu": 0.5}})
    assert model_bytes(result) != model_bytes(go({}))
    assert model_bytes(result) == model_bytes(go({"fedprox": {"mu": 0.5}}))
    for line in records(result):
        assert set(line["losses"]) == {"task", "fedprox.proximal"}
        assert line["losses"]["fedprox.proximal"] > 0


def test_a_larger_mu_keeps_the_client_nearer_to_w_t(go):
    distances = [
        records(go({"fedprox": {"mu": mu}}, rounds=1, clients=1))[0]["losses"]["fedprox.proximal"]
        for mu in (1e-6, 1.0, 10.0)
    ]
    assert distances[0] > distances[1] > distances[2] > 0


def test_buffers_have_no_part_in_the_term(go):
    """Weights that cannot move (lr 1e-30) have distance 0, however far BatchNorm's statistics go."""
    options = {"model": with_batch_norm, "lr": 1e-30, "weight_decay": 0.0, "rounds": 1}
    result, fedavg = go({"fedprox": {"mu": 5.0}}, **options), go({}, **options)
    assert records(result)[0]["losses"]["fedprox.proximal"] == 0.0
    assert (result.model.encoder.base.norm.running_mean != 0).all()
    assert model_bytes(result) == model_bytes(fedavg)
