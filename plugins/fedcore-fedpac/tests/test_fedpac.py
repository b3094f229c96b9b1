"""FedPAC: the quadratic programme against NumPy, combined heads of whole runs, and who trains what when."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore_fedpac import combination, head_statistics, least_quadratic, objective
from fedcore_testing import (
    client_arrays,
    federations,
    initial_weights,
    installed,
    mean_by_hand,
    model_bytes,
    personal_state,
    plugin_state,
    same_tensors,
    small_config,
    weights,
)
from tests.sentences import raises, warns

SKEWED = {"partition": "classes", "classes_per_client": 4}
A, B, W, BIAS = "encoder.base.1.weight", "encoder.base.1.bias", "classifier.weight", "classifier.bias"
SEEN: dict = {}
go = federations(local_epochs=2, client_test_fraction=0.2, samples=300)


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


class Models(Plugin):
    """Notes the clients' models at the end of their training."""

    @hookimpl
    def end_local(self, client):
        SEEN[client.id] = client.network().classifier.weight.detach().double().numpy()


# --- the quadratic programme ------------------------------------------------------------------------------------


def numpy_minimum(matrix):
    """Every support: the affine minimum on it, the best of the feasible ones."""
    best, size = np.inf, len(matrix)
    for k in range(1, size + 1):
        for support in combinations(range(size), k):
            part = matrix[np.ix_(support, support)]
            system = np.block([[part, np.ones((k, 1))], [np.ones((1, k)), 0]])
            alpha = np.linalg.lstsq(system, np.eye(k + 1)[k], rcond=None)[0][:k]
            if (alpha >= -1e-12).all():
                best = min(best, alpha @ part @ alpha)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rank", [1, 2, 6])
def test_the_minimum_is_the_best_of_all_supports(seed, rank):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((6, rank)) + (seed % 3)
    matrix = root @ root.T + np.diag(rng.random(6)) * (seed % 2)
    alpha = least_quadratic(torch.tensor(matrix)).numpy()
    assert alpha.min() >= 0
    assert alpha.sum() == pytest.approx(1)
    assert alpha @ matrix @ alpha == pytest.approx(numpy_minimum(matrix), abs=1e-9 * matrix.max())


def test_many_clients():
    root = torch.randn(60, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    matrix = root @ root.T + torch.diag(torch.rand(60, generator=torch.Generator().manual_seed(1)).double())
    alpha = least_quadratic(matrix)
    gradient = matrix @ alpha
    assert (gradient >= alpha @ gradient - 1e-8 * matrix.max()).all()


def test_equal_clients_share_equally_and_a_zero_matrix_has_a_minimum():
    torch.testing.assert_close(least_quadratic(torch.eye(4)), torch.full((4,), 0.25, dtype=torch.float64))
    assert least_quadratic(torch.zeros(3, 3)).sum() == 1


def test_statistics_and_objective_against_numpy():
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((n, 3)), rng.integers(0, 4, n)) for n in (9, 5, 7)]
    found = [head_statistics(torch.tensor(z), torch.tensor(y), 4) for z, y in clients]
    variances, means = [], []
    for z, y in clients:
        share = [np.mean(y == c) for c in range(4)]
        mu = [z[y == c].mean(0) if (y == c).any() else np.zeros(3) for c in range(4)]
        second = [(z[y == c] ** 2).sum(1).mean() if (y == c).any() else 0.0 for c in range(4)]
        variances.append(sum(p * s - p**2 * m @ m for p, s, m in zip(share, second, mu)) / len(z))
        means.append([p * m for p, m in zip(share, mu)])
    np.testing.assert_allclose(torch.stack([v for v, _ in found]), variances, rtol=1e-12)
    np.testing.assert_allclose(torch.stack([h for _, h in found]), means, rtol=1e-12)
    h = np.array(means)
    expected = np.diag(variances) + np.einsum("jcd,kcd->jk", h[1] - h, h[1] - h)
    given = torch.stack([v for v, _ in found]), torch.stack([h for _, h in found])
    np.testing.assert_allclose(objective(*given, 1), expected, rtol=1e-12)
    shares = combination(*given, 1)
    assert shares.sum().item() == pytest.approx(1)
    assert ((shares == 0) | (shares > 1e-3)).all()


# --- whole runs -------------------------------------------------------------------------------------------------


def small(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), 6, num_classes)


def step_by_hand(w, x, y, centroids, pull, epoch):
    """Gradients of the part that the epoch trains."""
    z = x @ w[A].T + w[B]
    logits = z @ w[W].T + w[BIAS]
    p = np.exp(logits - logits.max(1, keepdims=True))
    error = (p / p.sum(1, keepdims=True) - y) / len(x)
    if epoch == 0:
        return {W: error.T @ z, BIAS: error.sum(0)}
    dz = error @ w[W]
    if centroids is not None:
        dz = dz + pull * 2 * (z - y @ centroids) / z.size
    return {A: dz.T @ x, B: dz.sum(0)}


def test_a_run_is_the_method_in_numpy(go, tmp_path):
    """Two rounds of full batches: the head's epoch at its own rate, then the encoder's; clients lack classes."""
    run = {**SKEWED, "model": small, "batch_size": 5000, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    result = go({"fedpac": {"lambda": 3.0, "head_lr": 0.4}}, **run)
    start = initial_weights(small_config(tmp_path, "fedpac", **run, local_epochs=2, client_test_fraction=0.2))
    w = {name: tensor.double().numpy() for name, tensor in start.items()}
    clients = client_arrays(result)
    heads, centroids, known = [{n: w[n] for n in (W, BIAS)} for _ in clients], np.zeros((10, 6)), np.zeros(10, bool)
    for t in range(2):
        ends, statistics = [], []
        for k, (x, y) in enumerate(clients):
            own = {**w, **heads[k]}
            z = x @ own[A].T + own[B]
            statistics.append(head_statistics(torch.tensor(z), torch.tensor(y.argmax(1)), 10))
            for epoch in range(2):
                rate = 0.4 if epoch == 0 else 0.1
                found = step_by_hand(own, x, y, centroids if t else None, 3.0, epoch)
                own |= {n: own[n] - rate * g for n, g in found.items()}
            ends.append(own)
        variances, means = (torch.stack(each) for each in zip(*statistics))
        for k in range(len(clients)):
            shares = combination(variances, means, k).numpy()
            heads[k] = {n: sum(s * end[n] for s, end in zip(shares, ends)) for n in (W, BIAS)}
        counts = sum(y.sum(0) for _, y in clients)
        sums = sum(y.T @ (x @ end[A].T + end[B]) for end, (x, y) in zip(ends, clients))
        known = counts > 0
        centroids = np.where(known[:, None], sums / np.maximum(counts, 1)[:, None], centroids)
        w |= mean_by_hand([{n: end[n] for n in (A, B)} for end in ends], [len(x) for x, _ in clients])
    state = plugin_state(result, "fedpac")
    for name in (A, B):
        np.testing.assert_allclose(weights(result)[name], w[name], atol=2e-5)
    for k, head in enumerate(heads):
        for name, value in head.items():
            np.testing.assert_allclose(state[f"{k}:{name}"], value, atol=2e-5)
    np.testing.assert_allclose(state["prototypes"], centroids, atol=2e-5)


def test_combined_heads_are_the_shares_of_the_uploaded_ones(go):
    result = go("fedpac", Models, **SKEWED, rounds=1)
    state = plugin_state(result, "fedpac")
    assert set(state) == {"prototypes", "known", *(f"{k}:{name}" for k in range(3) for name in (W, BIAS))}
    for k in range(3):
        columns = np.stack([SEEN[j].ravel() for j in range(3)], 1)
        shares = np.linalg.lstsq(columns, state[f"{k}:{W}"].double().numpy().ravel(), rcond=None)[0]
        assert shares.sum() == pytest.approx(1, abs=1e-4)
        assert (shares > -1e-4).all()


@pytest.mark.parametrize("epochs", [2, 3])
def test_without_both_ideas_it_is_fedrep_to_the_bit(go, epochs):
    plain, skewed = {"lambda": 0.0, "combine": False, "head_lr": None}, {**SKEWED, "local_epochs": epochs}
    pac, rep = go({"fedpac": plain}, **skewed), go({"fedrep": {"representation_epochs": epochs - 1}}, **skewed)
    shared = [name for name in weights(rep) if name.startswith("encoder.")]
    assert all(torch.equal(weights(pac)[name], weights(rep)[name]) for name in shared)
    assert all(same_tensors(personal_state(pac, k), personal_state(rep, k)) for k in range(3))


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"lambda": 0.1}, {"combine": False}, {"head_epochs": 2}, {"head_lr": None}]
    found = {model_bytes(go({"fedpac": change}, **SKEWED, local_epochs=3)) for change in changes}
    assert len(found) == len(changes)


def test_an_encoder_that_nobody_trains_is_warned_of(go):
    with warns(RuntimeWarning, "fedpac", 2, "--local-epochs 3"):
        go({"fedpac": {"head_epochs": 2}}, rounds=1)
    with warns(RuntimeWarning, "fedpac", 5, "--local-epochs 2"):
        go("fedpac", rounds=1, local_steps=5)


@pytest.mark.parametrize("other", ["fedper", "scaffold", "fednova", "fedsam", "ditto"])
def test_what_cannot_be_combined_is_refused(go, other):
    with raises(PluginConflictError, other):
        go("fedpac", other)


def test_with_the_rounds_learning_rate_another_plugin_can_have_the_gradients(go):
    both, alone = (go({"fedpac": {"head_lr": None}}, *others, rounds=1) for others in ((installed("fedsam"),), ()))
    assert model_bytes(both) != model_bytes(alone)


@pytest.mark.slow
def test_clients_learn_their_digits(go):
    result = go("fedpac", **SKEWED, rounds=4, local_epochs=3, batch_size=16)
    assert result.metrics["personal"]["accuracy"] > 0.8
