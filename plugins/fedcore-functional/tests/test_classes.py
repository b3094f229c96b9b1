"""Statistics by class against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore_functional import check_counts, class_means, class_statistics, class_sums
from tests.drawn import LABELS, B, C, D, numbers
from tests.sentences import raises


def test_class_means_equal_numpy() -> None:
    z = numbers(B, D, grad=True)
    means, counts = class_means(z, LABELS, C)
    assert counts.tolist() == [4, 3, 0, 4, 1]
    assert counts.dtype == torch.int64
    assert means.dtype == torch.float64
    for c in range(C):
        members = z.detach().numpy()[LABELS.numpy() == c]
        expected = members.mean(0) if len(members) else np.zeros(D)
        np.testing.assert_allclose(means[c].detach().numpy(), expected, rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(lambda z: class_means(z, LABELS, C)[0], (z,))


def test_class_means_leave_out_labels_outside_the_classes() -> None:
    means, counts = class_means(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 2, -1]), 2)
    assert means.tolist() == [[1.0], [0.0]]
    assert counts.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_class_sums_of_half_precision_are_float32(dtype: torch.dtype) -> None:
    sums, _ = class_sums(torch.full((3000, 1), 100.0, dtype=dtype), torch.zeros(3000, dtype=torch.int64), 1)
    assert (sums.dtype, sums.item()) == (torch.float32, 300_000.0)  # beyond what float16 holds


@pytest.mark.parametrize(
    ("counts", "how", "named"),
    [
        ([3, -1], {}, (-1, 0)),
        ([3, 0], {"least": 1}, (0, 1)),
        ([3, 3], {}, (6, 5)),
        ([3, 1], {"complete": True}, (4, 5)),
        ([2**62, 2**62, 2**62], {}, (3 * 2**62, 5)),
    ],
)
def test_counts_that_a_client_cannot_have(counts: list[int], how: dict[str, int], named: tuple[int, int]) -> None:
    check_counts(torch.tensor([3, 2]), 5, complete=True, least=1)
    check_counts(torch.tensor([[3, 0]]), 5)
    check_counts(torch.tensor([], dtype=torch.int64), 5, least=1)
    with raises(ValueError, "'counts'", *named):
        check_counts(torch.tensor(counts), 5, **how)  # type: ignore[arg-type]


def test_class_statistics_equal_numpy() -> None:
    z = numbers(B, D, grad=True)
    counts, means, covariances = class_statistics(z, LABELS, C)
    assert counts.tolist() == [4, 3, 0, 4, 1]
    assert (means.dtype, covariances.dtype, means.requires_grad) == (torch.float64, torch.float64, False)
    assert (means.shape, covariances.shape) == ((C, D), (C, D, D))
    for c in range(C):
        members = z.detach().numpy()[LABELS.numpy() == c]
        mean = members.mean(0) if len(members) else np.zeros(D)
        covariance = np.cov(members, rowvar=False, ddof=1) if len(members) > 1 else np.zeros((D, D))
        np.testing.assert_allclose(means[c].numpy(), mean, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(covariances[c].numpy(), covariance, rtol=1e-12, atol=1e-14)


def test_class_statistics_compute_in_float64_and_check_labels() -> None:
    far = torch.tensor([[1e4], [1e4 + 1]])  # float32, where the squares would cancel
    _, means, covariances = class_statistics(far, torch.tensor([0, 0]), 1)
    assert means.item() == 10000.5
    assert covariances.item() == 0.5
    with raises(ValueError, "0"):
        class_statistics(far, torch.tensor([0, 2]), 2)
    counts, means, covariances = class_statistics(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 2)
    assert not any(statistic.any() for statistic in (counts, means, covariances))
