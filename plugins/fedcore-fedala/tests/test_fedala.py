"""FedALA: the equations, a hand case through the round loop, what eta = 0 means, and what a client starts from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcore import Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore_fedala import mixed, renewed_share, settled
from fedcore_testing import (
    client_state,
    federations,
    linear,
    softmax_by_hand,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(**FEW)


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mixture_and_share_against_numpy(dtype):
    stream = torch.Generator().manual_seed(0)
    own, received, gradient = (torch.randn(5, 3, generator=stream, dtype=torch.float64).to(dtype) for _ in range(3))
    share = torch.rand(5, 3, generator=stream, dtype=torch.float64).to(dtype)
    a, b, g, w = (t.double().numpy() for t in (own, received, gradient, share))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(mixed(own, received, share), a + (b - a) * w, rtol=tolerance, atol=tolerance)
    expected = np.clip(w - 0.5 * g * (b - a), 0, 1)
    found = renewed_share(share, gradient, own, received, 0.5)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert (expected == 0).any()
    assert ((expected > 0) & (expected < 1)).any()


def test_the_gradient_in_w_is_autograds():
    own, received, share = (torch.randn(4, dtype=torch.float64) for _ in range(3))
    share.requires_grad_()
    theta = mixed(own, received, share)
    theta.retain_grad()
    theta.pow(3).sum().backward()
    torch.testing.assert_close(share.grad, theta.grad * (received - own))


def test_the_ends_of_the_share():
    own, received = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert torch.equal(mixed(own, received, torch.ones(2)), received)
    assert torch.equal(mixed(own, received, torch.zeros(2)), own)


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([1.0] * 9, False),
        ([1.0] * 10, True),
        ([5.0, *[1.0] * 10], True),
        ([float("inf")], True),
        ([*[1.0] * 9, float("nan")], True),
    ],
)
def test_settled_after_ten_equal_losses_or_one_that_is_not_finite(losses, found):
    assert settled(losses, 10, 0.01) is found


# --- in a run ----------------------------------------------------------------------------------------------------


STARTS: list[tuple[int, int, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []


class Watches(Plugin):
    """Notes what each client received, and what its first step starts from."""

    @hookimpl
    def broadcast(self, server):
        return dict(server.model)

    @hookimpl
    def begin_local(self, client):
        client.scratch["received"] = {name: client.received[name] for name in client.parameters}

    @hookimpl
    def local_loss(self, step):
        if step.client.steps == 0:
            started = {n: p.detach().clone() for n, p in step.model.named_parameters()}
            STARTS.append((step.round, step.client.id, step.client.scratch["received"], started))


class Reference(Plugin):
    """Learns W_i in NumPy from what the client sees, and notes the start that it expects."""

    reads = ("previous",)
    expected: list[dict[str, np.ndarray]] = []
    losses: list[float] = []

    @hookimpl
    def broadcast(self, server):
        return dict(server.model)

    @hookimpl
    def begin_local(self, client):
        if client.previous_model is None:
            return
        names = ("classifier.weight", "classifier.bias")
        own = {n: client.previous_model.get_parameter(n).detach().double().numpy() for n in names}
        new = {n: client.received[n].double().numpy() for n in names}
        shares = {n: np.ones_like(own[n]) for n in names}
        order = torch.randperm(client.n, generator=client.generator("ala"))[: round(0.5 * client.n)]
        x, _, labels = client.forward()
        x, y = x.double().numpy(), F.one_hot(labels, 10).double().numpy()
        for _ in range(3):
            for part in order.split(10):
                at = {n: own[n] + (new[n] - own[n]) * shares[n] for n in names}
                g = softmax_by_hand(at, x[part], y[part])[1]
                shares = {n: np.clip(shares[n] - 20.0 * g[n] * (new[n] - own[n]), 0, 1) for n in names}
        start = {n: own[n] + (new[n] - own[n]) * shares[n] for n in names}
        self.expected.append(start)
        self.losses.append(softmax_by_hand(start, x[order], y[order])[0])


def test_what_a_client_starts_from_is_learned_as_in_numpy(go, monkeypatch):
    """Softmax regression; three epochs over half of the samples, in batches of ten."""
    STARTS.clear()
    Reference.expected.clear()
    Reference.losses.clear()
    judged = []
    monkeypatch.setattr("fedcore_fedala.equations.settled", lambda losses, *_: judged.append(losses[-1]))
    given = {"eta": 20.0, "fraction": 0.5, "most_epochs": 3, "threshold": 1e-9}
    go({"fedala": given, Watches: {}, Reference: {}}, model=linear, clients=2, rounds=2)
    second = [row for row in STARTS if row[0] == 1]
    assert len(second) == len(Reference.expected) == 2
    for (_, _, received, started), expected in zip(second, Reference.expected):
        moved = 0.0
        for name, value in expected.items():
            np.testing.assert_allclose(started[name], value, atol=2e-5)
            moved += float((started[name] - received[name]).abs().sum())
        assert moved > 0, "the start is not what was received"
    np.testing.assert_allclose(judged[2::3], Reference.losses, atol=2e-5)


def test_the_first_participation_and_lower_layers_start_as_received(go):
    STARTS.clear()
    result = go({"fedala": {"eta": 50.0}, Watches: {}}, model=with_batch_norm, rounds=2)
    for number, _, received, started in STARTS:
        other = {name for name in received if not torch.equal(received[name], started[name])}
        assert other <= ({"classifier.weight", "classifier.bias"} if number else set())
    assert any(
        not torch.equal(received["classifier.weight"], started["classifier.weight"])
        for number, _, received, started in STARTS
        if number
    )
    shares = client_state(result, 0)["fedala"]
    assert set(shares) == {"classifier.weight", "classifier.bias"}
    assert all(0 <= float(share.min()) <= float(share.max()) <= 1 for share in shares.values())


def test_all_layers_can_be_learned(go):
    result = go({"fedala": {"layers": ["*"], "eta": 50.0, "most_epochs": 2}}, model=with_batch_norm)
    assert set(client_state(result, 0)["fedala"]) == {
        n for n, t in weights(result).items() if not n.startswith("x")
    } - {f"encoder.base.norm.{buffer}" for buffer in ("running_mean", "running_var", "num_batches_tracked")}


class Bfloat16(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1).bfloat16()).relu()


def of_bfloat16(num_classes, input_shape):
    return SplitModel(Bfloat16(64, 16), 16, num_classes).bfloat16()


def test_w_i_learns_small_steps_in_a_network_of_bfloat16(go):
    """Below 1 bfloat16 has no number above 0.9961: W_i lost all smaller steps."""
    result = go("fedala", model=of_bfloat16, rounds=2)
    learned = client_state(result, 0)["fedala"]["classifier.weight"]
    assert ((learned > 0.9961) & (learned < 1)).any()


def test_the_evaluated_model_is_the_trained_one(go):
    result = go({"fedala": {}}, client_test_fraction=0.3, clients=1, rounds=1)
    assert result.metrics["personal"]["accuracy"] == result.metrics["global_local"]["accuracy"], "the mean of one"


@pytest.mark.parametrize("other", ["fedper", "scaffold", "feddyn"])
def test_what_cannot_be_combined_is_refused(go, other):
    with raises(PluginConflictError, other):
        go("fedala", other)
