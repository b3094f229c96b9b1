"""FPL: FINCH and the losses against NumPy, cluster prototypes of whole runs, and the ablations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import Plugin, hookimpl
from fedcore_fpl import cluster_contrast, cluster_prototypes, finch, first_neighbour_groups
from fedcore_testing import client_arrays, federations, installed, model_bytes, plugin_state, records

SKEWED = {"partition": "classes", "classes_per_client": 4}
SEEN: dict = {}
go = federations(samples=300)


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


class Uploads(Plugin):
    """Notes the models that arrive."""

    @hookimpl
    def pre_aggregate(self, server, update):
        SEEN[server.round, update.client] = {name: t.double().numpy() for name, t in update.model.items()}


# --- FINCH ------------------------------------------------------------------------------------------------------


def numpy_groups(points):
    """The clustering equation as printed: A(i, j) = 1 if j is i's nearest, i is j's, or both have the same."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    near, n = cosine.argmax(1), len(points)
    linked = np.eye(n, dtype=bool)
    for i in range(n):
        for j in range(n):
            linked[i, j] |= near[i] == j or near[j] == i or near[i] == near[j]
    for _ in range(n):
        linked = linked @ linked
    return [frozenset(np.flatnonzero(row).tolist()) for row in linked]


def sets_of(labels):
    return [frozenset((labels == label).nonzero().flatten().tolist()) for label in labels]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_groups_are_the_clustering_equations(seed, n):
    points = np.random.default_rng(seed).standard_normal((n, 3))
    assert sets_of(first_neighbour_groups(torch.tensor(points))) == numpy_groups(points)


def test_the_coarsest_partition_is_taken():
    """Pairs of pairs: the first partition has four clusters, the second two, the third would have one."""
    angles = np.deg2rad([0, 1, 10, 11, 90, 91, 100, 101])
    points = torch.tensor(np.stack([np.cos(angles), np.sin(angles)], 1))
    assert first_neighbour_groups(points).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert finch(points).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_first_partition_of_one_cluster_is_kept():
    assert finch(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [0, 0]
    assert finch(torch.tensor([[1.0, 0.0]])).tolist() == [0]


def test_clusters_do_not_depend_on_the_order():
    points = torch.randn(15, 4, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    straight, mixed = finch(points), finch(points[order])
    assert {frozenset(order[list(s)].tolist()) for s in sets_of(mixed)} == set(sets_of(straight))


def test_cluster_prototypes_of_a_hand_case():
    """Class 0: two domains of two clients. Class 1: one holder. Class 2: nobody."""
    prototypes = torch.zeros(4, 3, 2)
    prototypes[:, 0] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.1], [0.1, 3.0]])
    prototypes[2, 1] = torch.tensor([5.0, 5.0])
    known = torch.tensor([[True, False, False], [True, False, False], [True, True, False], [True, False, False]])
    clusters, classes = cluster_prototypes(prototypes, known)
    torch.testing.assert_close(clusters, torch.tensor([[2.0, 0.05], [0.05, 2.0], [5.0, 5.0]]))
    assert classes.tolist() == [0, 0, 1]


# --- the contrast -----------------------------------------------------------------------------------------------


def numpy_contrast(z, y, p, classes, tau):
    """Sample by sample, as printed."""
    total = 0.0
    for zi, yi in zip(z, y):
        s = np.exp(p @ zi / np.linalg.norm(zi) / np.linalg.norm(p, axis=1) / tau)
        if (classes == yi).any():
            total -= np.log(s[classes == yi].sum() / s.sum())
    return total / len(z)


@pytest.mark.parametrize("tau", [0.02, 0.5, 1.0])
def test_value_and_gradient_against_numpy(tau):
    rng = np.random.default_rng(0)
    z, p = rng.standard_normal((6, 4)), rng.standard_normal((5, 4))
    y, classes = np.array([0, 1, 1, 2, 3, 0]), np.array([0, 0, 1, 3, 3])  # class 2 has none
    features = torch.tensor(z, requires_grad=True)
    others = [torch.tensor(a) for a in (y, p, classes)]
    value = cluster_contrast(features, *others, temperature=tau)
    value.backward()
    assert value.item() == pytest.approx(numpy_contrast(z, y, p, classes, tau), rel=1e-9)
    assert features.grad[3].abs().max() == 0
    for i in range(6):
        for j in range(4):
            step = np.zeros_like(z)
            step[i, j] = 1e-6
            slope = numpy_contrast(z + step, y, p, classes, tau) - numpy_contrast(z - step, y, p, classes, tau)
            assert features.grad[i, j].item() == pytest.approx(slope / 2e-6, rel=1e-4, abs=1e-7)


# --- whole runs -------------------------------------------------------------------------------------------------


def features_of(w, x):
    """Features of the model ``mlp`` in float64."""
    h = np.maximum(x @ w["encoder.base.fc1.weight"].T + w["encoder.base.fc1.bias"], 0)
    return np.maximum(h @ w["encoder.base.fc2.weight"].T + w["encoder.base.fc2.bias"], 0)


def test_cluster_prototypes_are_those_of_the_trained_models(go):
    result = go("fpl", Uploads, **SKEWED, clients=5, rounds=2)
    prototypes, known = torch.zeros(5, 10, 64, dtype=torch.float64), torch.zeros(5, 10, dtype=torch.bool)
    for client, (x, y) in enumerate(client_arrays(result)):
        known[client] = torch.tensor(y.sum(0) > 0)
        prototypes[client] = torch.tensor(y.T @ features_of(SEEN[1, client], x) / np.maximum(y.sum(0), 1)[:, None])
    clusters, classes = cluster_prototypes(prototypes, known)
    state = plugin_state(result, "fpl")
    assert set(state) == {"clusters", "classes"}
    assert torch.equal(state["classes"], classes)
    torch.testing.assert_close(state["clusters"], clusters, rtol=1e-4, atol=1e-5)


def test_the_first_round_is_fedavgs_to_the_bit(go):
    assert model_bytes(go("fpl", rounds=1)) == model_bytes(go({}, rounds=1))
    losses = [sorted(record["losses"]) for record in records(go("fpl"))]
    assert losses == [["task"], ["fpl.consistency", "fpl.contrast", "task"]]


def test_without_both_terms_nothing_is_sent(go):
    result = go({"fpl": {"contrast": 0.0, "consistency": 0.0}}, **SKEWED)
    assert all("fpl" not in record["bytes"]["by_plugin"] for record in records(result))


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"temperature": 0.5}, {"contrast": 0.0}, {"consistency": 0.0}, {"contrast": 0.5}]
    assert len({model_bytes(go({"fpl": change})) for change in changes}) == len(changes)


@pytest.mark.parametrize("other", ["fedprox", "moon"])
def test_runs_beside(go, other):
    assert model_bytes(go({"fpl": {}, installed(other): {}})) != model_bytes(go("fpl"))


@pytest.mark.slow
def test_learns_digits(go):
    assert go("fpl", rounds=4, local_epochs=2, batch_size=16, lr=0.01).metrics["global"]["accuracy"] > 0.6
