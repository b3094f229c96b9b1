"""The rules against NumPy in float64, by hand, and under a minority that sends anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore_robust import (
    clip_factor,
    coordinate_median,
    krum_scores,
    lowest,
    squared_distances,
    trimmed_mean,
)
from tests.sentences import raises

CASES = settings(deadline=None, max_examples=60)
DTYPES = [torch.float64, torch.float32, torch.float16]


def draw(seed, n, *shape, dtype=torch.float64):
    scale = 10.0 ** np.random.default_rng(seed).integers(-3, 4)
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, *shape)) * scale, dtype=dtype)


@CASES
@given(seed=st.integers(0, 2**31), n=st.integers(1, 12), dtype=st.sampled_from(DTYPES))
def test_the_median_is_numpys(seed, n, dtype):
    values = draw(seed, n, 3, 2, dtype=dtype)
    expected = torch.tensor(np.median(values.double().numpy(), axis=0)).to(dtype)
    assert torch.equal(coordinate_median(values), expected)


@CASES
@given(seed=st.integers(0, 2**31), n=st.integers(1, 12), data=st.data())
def test_the_trimmed_mean_is_numpys(seed, n, data):
    trim = data.draw(st.integers(0, (n - 1) // 2))
    values = draw(seed, n, 5)
    expected = np.sort(values.numpy(), axis=0)[trim : n - trim].mean(axis=0)
    np.testing.assert_allclose(trimmed_mean(values, trim), expected, rtol=1e-12, atol=1e-12)
    single = trimmed_mean(values.float(), trim)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-5 * values.abs().max().item())


def krum_reference(vectors: np.ndarray, f: int) -> np.ndarray:
    n = len(vectors)
    return np.array(
        [
            np.sort([np.square(vectors[i] - vectors[j]).sum() for j in range(n) if j != i])[: max(1, n - f - 2)].sum()
            for i in range(n)
        ]
    )


@CASES
@given(seed=st.integers(0, 2**31), n=st.integers(2, 10), data=st.data())
def test_krums_scores_are_numpys(seed, n, data):
    f = data.draw(st.integers(0, max(0, (n - 3) // 2)))
    parts = [draw(seed, n, 4, 2), draw(seed + 1, n, 3), draw(seed + 2, n)]
    vectors = np.concatenate([part.flatten(1).numpy() if part.ndim > 1 else part[:, None].numpy() for part in parts], 1)
    scores = krum_scores(squared_distances(parts), f)
    np.testing.assert_allclose(scores, krum_reference(vectors, f), rtol=1e-12)
    assert lowest(scores, 1) == [int(np.argmin(krum_reference(vectors, f)))]


def test_krum_by_hand():
    """Points 0, 1, 3, 90, 2 and f = 1: two neighbours each; 1 and 2 tie, and the first of them is taken."""
    scores = krum_scores(squared_distances([torch.tensor([0.0, 1.0, 3.0, 90.0, 2.0])]), 1)
    assert scores.tolist() == [1 + 4, 1 + 1, 1 + 4, 87**2 + 88**2, 1 + 1]
    assert lowest(scores, 1) == [1]
    assert lowest(scores, 4) == [0, 1, 2, 4]


def test_near_vectors_far_from_zero_keep_their_distance():
    values = torch.tensor([[1e6], [1e6 + 0.125]])
    assert squared_distances([values])[0, 1] == 0.125**2


@CASES
@given(seed=st.integers(0, 2**31), n=st.integers(3, 11), value=st.floats(-1e30, 1e30))
def test_a_minority_cannot_leave_the_honest_range(seed, n, value):
    values = draw(seed, n, 6)
    attackers = (n - 1) // 2
    values[:attackers] = value
    honest = values[attackers:]
    low, high = honest.min(0).values, honest.max(0).values
    for found in (coordinate_median(values), trimmed_mean(values, attackers)):
        tolerance = 1e-12 * honest.abs().max()
        assert bool(((found >= low - tolerance) & (found <= high + tolerance)).all())


@pytest.mark.parametrize("rule", [coordinate_median, lambda values: trimmed_mean(values, 1)])
def test_equal_values_are_returned_and_the_order_does_not_matter(rule):
    one = draw(3, 1, 4, dtype=torch.float32)
    assert torch.equal(rule(one.expand(5, 4)), one[0])
    values = draw(4, 6, 4, dtype=torch.float32)
    assert torch.equal(rule(values), rule(values[torch.tensor([5, 2, 0, 4, 1, 3])]))


def test_whole_numbers_and_booleans_have_a_clients_own_median():
    assert coordinate_median(torch.tensor([9, 1, 2**60, 3])).item() == 3
    assert coordinate_median(torch.tensor([[True], [False], [True]])).tolist() == [True]


def test_extreme_values_do_not_overflow():
    big = torch.tensor([[3e38], [3.2e38], [3e38], [3.4e38]])
    assert torch.isfinite(coordinate_median(big)).all()
    assert torch.isfinite(trimmed_mean(big, 1)).all()
    assert torch.isfinite(squared_distances([big])).all()


@pytest.mark.parametrize(("n", "trim"), [(4, 2), (1, 1), (3, -1)])
def test_nothing_left_to_average(n, trim):
    with raises(ValueError, f"{trim} values", n):
        trimmed_mean(torch.zeros(n, 2), trim)


@pytest.mark.parametrize(("norm", "bound", "factor"), [(3.0, 4.0, 1.0), (5.0, 2.0, 0.4), (np.inf, 1.0, 0.0)])
def test_clip_factor(norm, bound, factor):
    assert clip_factor(norm, bound) == factor
