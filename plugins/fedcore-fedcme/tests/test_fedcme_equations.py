"""Eqs. 4, 5, 6, 9 and the matching, against NumPy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore_fedcme import (
    alignment_loss,
    evaluation_vector,
    global_features,
    local_features,
    match_clients,
    match_many_to_one,
)
from fedcore_functional import class_sums

NAN = float("nan")


def batch(seed, n, classes, d=4):
    """Features and labels; some classes are missing."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.integers(0, max(1, classes - 1), size=n)


# --- Eq. 9 ----------------------------------------------------------------------------------------------------


def alignment(z, y, zeta, known):
    return alignment_loss(z, y, zeta, known)


def alignment_reference(z, y, zeta, known):
    total = 0.0
    for c in sorted(set(y.tolist())):
        if known[c]:
            total += float(((z[y == c].mean(axis=0) - zeta[c]) ** 2).sum())
    return total


@pytest.mark.parametrize(("n", "classes"), [(1, 3), (3, 3), (16, 5), (64, 10)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_alignment_is_equation_9(n, classes, share):
    z, y = batch(n, n, classes)
    rng = np.random.default_rng(1)
    zeta, known = rng.normal(size=(classes, 4)), rng.random(classes) < share
    expected = alignment_reference(z, y, zeta, known)
    zeta[~known] = NAN  # must not matter
    features = torch.from_numpy(z).requires_grad_()
    value = alignment(features, torch.from_numpy(y), torch.from_numpy(zeta), torch.from_numpy(known))
    assert value.shape == ()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    value.backward()
    for i, c in enumerate(y):  # the derivative by hand
        mean, count = z[y == c].mean(axis=0), (y == c).sum()
        gradient = 2 * (mean - zeta[c]) / count if known[c] else np.zeros(4)
        np.testing.assert_allclose(features.grad[i], gradient, rtol=1e-10, atol=1e-14)


def test_alignment_keeps_float32():
    z, y, zeta = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([0, 0, 1]), torch.tensor([[5.0], [0.0], [NAN]])
    value = alignment(z, y, zeta, torch.tensor([True, True, False]))
    assert value.dtype == torch.float32
    assert value.item() == (2.0 - 5.0) ** 2 + 9.0**2


def test_the_mean_over_features_does_not_grow_with_their_number():
    z, zeta = torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.zeros(2, 2)
    y = torch.tensor([0, 1])
    known = torch.tensor([True, False])
    assert float(alignment_loss(z, y, zeta, known)) == 10.0
    assert float(alignment_loss(z, y, zeta, known, mean=True)) == 5.0
    wide = [torch.cat([part, part], dim=1) for part in (z, zeta)]
    assert float(alignment_loss(wide[0], y, wide[1], known, mean=True)) == 5.0


def test_alignment_draws_class_means_to_their_global_features():
    z, y, zeta = torch.randn(8, 3, requires_grad=True), torch.arange(8) % 2, torch.randn(2, 3)
    known = torch.tensor([True, True])
    (gradient,) = torch.autograd.grad(alignment(z, y, zeta, known), z)
    moved = z.detach() - 0.5 * gradient
    for c in range(2):
        before, after = ((t[y == c].mean(0) - zeta[c]).norm() for t in (z.detach(), moved))
        assert after < 0.8 * before


# --- Eq. 4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "classes"), [(1, 4), (7, 3), (50, 10)])
def test_vector_is_equation_4(n, classes):
    rng = np.random.default_rng(n)
    logits, y = rng.normal(size=(n, classes)), rng.integers(0, max(1, classes - 1), size=n)
    expected = [np.mean(logits[y == c].argmax(axis=1) == c) if (y == c).any() else 0.0 for c in range(classes)]
    vector = evaluation_vector(torch.from_numpy(logits), torch.from_numpy(y), classes)
    assert vector.dtype == torch.float64
    np.testing.assert_allclose(vector, expected, rtol=1e-15)


def test_nan_is_right_for_no_class():
    logits = torch.tensor([[NAN, NAN], [1.0, 0.0], [0.0, 1.0]])
    assert evaluation_vector(logits, torch.tensor([0, 0, 1]), 2).tolist() == [0.5, 1.0]


# --- Eqs. 5 and 6 ---------------------------------------------------------------------------------------------


def test_local_features_are_equation_5_over_batches_and_epochs():
    total, seen, everything = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.int64), []
    for seed, n in enumerate((16, 16, 1, 3)):
        z, y = batch(seed, n, 5)
        sums, counts = class_sums(torch.from_numpy(z).float(), torch.from_numpy(y), 5)
        assert sums.dtype == torch.float32
        total += sums
        seen += counts
        everything.append((z.astype(np.float32).astype(np.float64), y))
    z, y = (np.concatenate(parts) for parts in zip(*everything))
    features, held = local_features(total, seen)
    for c in range(5):
        assert bool(held[c]) == bool((y == c).any())
        expected = z[y == c].mean(axis=0) if held[c] else np.zeros(4)
        np.testing.assert_allclose(features[c], expected, rtol=1e-6, atol=1e-7)
    assert not held[4]


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_global_features_are_equation_6_with_memory(clients, share):
    rng = np.random.default_rng(clients)
    classes, d = 8, 3
    local, held = rng.normal(size=(clients, classes, d)), rng.random((clients, classes)) < 0.5
    held[:, 0], held[:, 1] = False, True
    memory, known = rng.normal(size=(classes, d)), rng.random(classes) < share
    expected, knows = np.zeros((classes, d)), np.zeros(classes, dtype=bool)
    for c in range(classes):  # client by client, as Algorithm 1, lines 29 to 35
        filled = [local[k, c] if held[k, c] else memory[c] for k in range(clients) if held[k, c] or known[c]]
        if filled:
            expected[c], knows[c] = np.mean(filled, axis=0), True
    memory[~known] = NAN
    features, now_known = global_features(
        torch.from_numpy(np.where(held[..., None], local, 0).sum(axis=0)),
        torch.from_numpy(held.sum(axis=0)),
        clients,
        torch.from_numpy(memory),
        torch.from_numpy(known),
    )
    assert now_known.tolist() == knows.tolist()
    np.testing.assert_allclose(features.numpy()[knows], expected[knows], rtol=1e-12, atol=1e-14)
    assert torch.isfinite(features).all()


def test_memory_of_a_class_nobody_holds_does_not_drift():
    memory, known = torch.tensor([[0.1], [0.7]], dtype=torch.float64), torch.tensor([True, True])
    for _ in range(50):
        memory, known = global_features(torch.zeros(2, 1).double(), torch.zeros(2).long(), 7, memory, known)
    np.testing.assert_allclose(memory, [[0.1], [0.7]], rtol=1e-13)


# --- matching -------------------------------------------------------------------------------------------------


def cosine(a, b):
    return round(float(a @ b) / (max(np.linalg.norm(a), 1e-8) * max(np.linalg.norm(b), 1e-8)), 9)


def brute_force(vectors):
    """The three steps of section IV-A on a shrinking list, in NumPy."""
    left = {k: np.asarray(v, dtype=np.float64) for k, v in vectors.items()}
    pairs = {}
    if left:
        mean = sum(left.values()) / len(left)
        order = [k for _, k in sorted((cosine(v, mean), k) for k, v in left.items())]
        while len(order) > 1:
            k, *rest = order
            j = sorted((cosine(left[k], left[i]), i) for i in rest)[0][1]
            pairs[k], pairs[j] = j, k
            order = [i for i in rest if i != j]
    return pairs


def vectors(*rows, ids=None):
    return {k: torch.tensor(row) for k, row in zip(ids or range(len(rows)), rows)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        (vectors([1.0, 0.0], ids=[4]), {}),
        # Opposite ones meet; ids, not positions.
        (vectors([1.0, 0.0], [0.0, 1.0], ids=[8, 3]), {8: 3, 3: 8}),
        # All equal: by id.
        (vectors(*[[0.5, 0.5]] * 4), {0: 1, 1: 0, 2: 3, 3: 2}),
        # All as far from the mean as one another: 0 takes the smaller id among 2 and 3.
        (vectors([1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]), {0: 2, 2: 0, 1: 3, 3: 1}),
        # The first in the order is the one least like the mean (2), not the first id.
        (vectors([1.0, 0.2], [1.0, 0.1], [0.0, 1.0], [0.9, 0.2]), {2: 1, 1: 2, 3: 0, 0: 3}),
        # Odd: the one nearest the mean, 2, stays alone.
        (vectors([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]), {0: 1, 1: 0}),
        # First round: nobody has a vector; odd.
        (vectors(*[[0.0, 0.0, 0.0]] * 5), {0: 1, 1: 0, 2: 3, 3: 2}),
        # A newcomer's zero vector has cosine 0: first in the order, and as far from everybody as orthogonal ones.
        (vectors([1.0, 0.0], [0.9, 0.1], [0.0, 0.0], [0.0, 1.0]), {2: 0, 0: 2, 3: 1, 1: 3}),
        # A difference below 1e-9 is none: 1 and 2 tie, though 2 has the smaller cosine with 0.
        (vectors([1.0, 0.0], [1e-11, 1.0], [0.0, 1.0], [1.0, 1.0]), {0: 1, 1: 0, 2: 3, 3: 2}),
    ],
)
def test_matching_by_hand(given, expected):
    assert match_clients(given) == expected
    assert brute_force(given) == expected


def random_cohort(seed):
    rng = np.random.default_rng(seed)
    size, classes = rng.integers(1, 12), rng.integers(1, 6)
    ids = rng.permutation(100)[:size].tolist()
    draw = rng.integers(0, 3, size=(size, classes)) / 2.0 if seed % 2 else rng.random((size, classes))
    return {k: torch.from_numpy(np.asarray(v, dtype=np.float64)) for k, v in zip(ids, draw)}


def test_matching_is_the_brute_force():
    for seed in range(100):
        cohort = random_cohort(seed)
        pairs = match_clients(cohort)
        assert pairs == brute_force(cohort)
        assert len(pairs) == len(cohort) // 2 * 2
        assert all(pairs[pairs[k]] == k != pairs[k] for k in pairs)
        shuffled = dict(reversed(cohort.items()))
        assert match_clients(shuffled) == pairs
        assert match_clients({k: 3.7 * v for k, v in cohort.items()}) == pairs
        donors = match_many_to_one(cohort)
        for k, v in cohort.items():
            others = sorted((cosine(v.numpy(), cohort[j].numpy()), j) for j in cohort if j != k)
            assert donors.get(k) == (others[0][1] if others else None)


def test_matching_takes_any_dtype_and_changes_nothing():
    cohort = {0: torch.tensor([1, 0]), 1: torch.tensor([0.0, 1.0], requires_grad=True)}
    assert match_clients(cohort) == {0: 1, 1: 0}
    assert cohort[0].tolist() == [1, 0]
    half = {k: v.detach().half() for k, v in cohort.items()}
    assert match_clients(half) == {0: 1, 1: 0}
