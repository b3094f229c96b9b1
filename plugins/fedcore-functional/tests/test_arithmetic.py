"""Membership of classes, and products that autocast does not round."""

from __future__ import annotations

import torch

from fedcore_functional.arithmetic import matmul, membership


def test_membership_is_one_hot_and_nothing_for_labels_outside():
    labels = torch.tensor([2, 0, 5, -1])
    assert membership(labels, 3).tolist() == [
        [False, False, True],
        [True, False, False],
        [False, False, False],
        [False, False, False],
    ]


def test_products_are_in_the_wider_dtype_also_under_autocast():
    a, b = torch.randn(3, 4, dtype=torch.float32), torch.randn(4, 2, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, single = matmul(a, b), matmul(a, b.float())
    assert found.dtype == torch.float64
    assert torch.equal(found, a.double() @ b)
    assert torch.equal(single, a @ b.float())
