"""Cosines and contrast against NumPy, by hand, and at the edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcore_functional import (
    class_means,
    cosine_similarity_matrix,
    model_contrastive_loss,
    prototype_contrastive_loss,
)
from tests.drawn import LABELS, B, C, D, numbers
from tests.sentences import raises


def numpy_cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (max(math.sqrt(a @ a), 1e-8) * max(math.sqrt(b @ b), 1e-8)))


def numpy_prototype_loss(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    temperature: float,
    known: list[bool],
    denominator: str,
) -> float:
    z, c = features.detach().numpy(), prototypes.detach().numpy()
    total = 0.0
    for i, y in enumerate(labels.tolist()):
        summed = [k for k in range(len(c)) if known[k] and not (denominator == "others" and k == y)]
        if known[y] and summed:
            logits = {k: numpy_cosine(z[i], c[k]) / temperature for k in {y, *summed}}
            total -= math.log(math.exp(logits[y]) / sum(math.exp(logits[k]) for k in summed))
    return total / len(z)


def test_cosine_matrix_is_every_pair() -> None:
    a, b = numbers(2, 3, D), numbers(2, 4, D, seed=1)
    result = cosine_similarity_matrix(a, b)
    assert result.shape == (2, 3, 4)
    for s in range(2):
        for i in range(3):
            for j in range(4):
                assert result[s, i, j].item() == pytest.approx(
                    numpy_cosine(a[s, i].numpy(), b[s, j].numpy()), abs=1e-14
                )


def test_cosine_of_zero_and_of_tiny_vectors_is_clamped() -> None:
    a = torch.tensor([[0.0, 0.0], [1e-9, 0.0]], dtype=torch.float64, requires_grad=True)
    result = cosine_similarity_matrix(a, torch.tensor([[2.0, 0.0]], dtype=torch.float64))
    assert result.flatten().tolist() == pytest.approx([0.0, 0.1])
    result.sum().backward()
    assert a.grad is not None
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cosine_of_zero_is_zero_in_half_precision(dtype: torch.dtype) -> None:
    assert cosine_similarity_matrix(torch.zeros(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype)).item() == 0


@pytest.mark.parametrize("denominator", ["all", "others"])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("unknown", [(), (2,), (0, 3), (0, 1, 2, 4), (0, 1, 2, 3, 4)])
def test_prototype_loss_equals_numpy(denominator: Any, temperature: float, unknown: tuple[int, ...]) -> None:
    z, prototypes = numbers(B, D, grad=True), numbers(C, D, seed=1, grad=True)
    known = [k not in unknown for k in range(C)]
    arguments: dict[str, Any] = {"temperature": temperature, "denominator": denominator}
    value = prototype_contrastive_loss(z, LABELS, prototypes, known=torch.tensor(known), **arguments)
    assert value.dtype == torch.float64
    expected = numpy_prototype_loss(z, LABELS, prototypes, temperature, known, denominator)
    assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    if not unknown:
        assert prototype_contrastive_loss(z, LABELS, prototypes, **arguments).item() == value.item()
    value.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    assert prototypes.grad is not None
    assert prototypes.grad.isfinite().all()
    assert not prototypes.grad[list(unknown)].any()
    assert not z.grad[torch.isin(LABELS, torch.tensor(unknown, dtype=torch.int64))].any()


@pytest.mark.parametrize("denominator", ["all", "others"])
@pytest.mark.parametrize("unknown", [(), (2,), (0, 3), (0, 1, 2, 4)])
def test_prototype_loss_gradient(denominator: Any, unknown: tuple[int, ...]) -> None:
    known = torch.tensor([k not in unknown for k in range(C)])
    assert torch.autograd.gradcheck(
        lambda z, c: prototype_contrastive_loss(z, LABELS, c, temperature=0.5, known=known, denominator=denominator),
        (numbers(B, D, grad=True), numbers(C, D, seed=1, grad=True)),
    )


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 0.0])
def test_unknown_prototypes_may_hold_anything(junk: float) -> None:
    z, prototypes = numbers(B, D, grad=True), numbers(C, D, seed=1)
    known = torch.tensor([True, True, False, False, True])
    expected = prototype_contrastive_loss(z, LABELS, prototypes, known=known)
    (expected_grad,) = torch.autograd.grad(expected, z)
    prototypes[~known] = junk
    value = prototype_contrastive_loss(z, LABELS, prototypes, known=known)
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == expected.item()
    assert torch.equal(grad, expected_grad)


def test_counts_serve_as_the_mask() -> None:
    z = numbers(B, D)
    means, counts = class_means(z, LABELS, C)
    value = prototype_contrastive_loss(z, LABELS, means, known=counts)
    assert value.item() == prototype_contrastive_loss(z, LABELS, means, known=counts > 0).item()


def test_wrong_options_are_refused() -> None:
    z = numbers(B, D)
    with raises(ValueError, "0"):
        prototype_contrastive_loss(z, LABELS, numbers(C, D), temperature=0)
    with raises(ValueError, "-1"):
        model_contrastive_loss(z, z, z, temperature=-1)
    with raises(ValueError, "'all'", "'others'", "'other'"):
        prototype_contrastive_loss(z, LABELS, numbers(C, D), denominator="other")  # type: ignore[arg-type]


def test_model_contrast_by_hand() -> None:
    # similarities 0.6 and 0 over temperature 0.5: loss = log(1 + exp(-1.2)), in NumPy's float64
    z = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    of_global = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    of_previous = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    value = model_contrastive_loss(z, of_global, of_previous, temperature=0.5)
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == pytest.approx(0.2632825, abs=5e-8)
    assert 5 * value.item() == pytest.approx(1.3164123, abs=5e-8)
    assert grad.flatten().tolist() == pytest.approx([0.0, 0.0925901], abs=5e-8)
    assert (5 * grad).flatten().tolist() == pytest.approx([0.0, 0.4629504], abs=1e-7)


def test_model_contrast_of_equal_models_is_log_two_without_gradient() -> None:
    z, other = numbers(B, D, grad=True), numbers(B, D, seed=1)
    value = model_contrastive_loss(z, other, other)
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == pytest.approx(math.log(2), abs=1e-15)
    assert not grad.any()


@pytest.mark.parametrize("temperature", [0.5, 0.05, 1e-3])
def test_model_contrast_equals_numpy(temperature: float) -> None:
    z, positive, negative = numbers(B, D), numbers(B, D, seed=1), numbers(B, D, seed=2)
    expected = np.mean(
        [
            np.logaddexp(0, (numpy_cosine(a, n) - numpy_cosine(a, p)) / temperature)
            for a, p, n in zip(z.numpy(), positive.numpy(), negative.numpy())
        ]
    )
    value = model_contrastive_loss(z, positive, negative, temperature=temperature)
    assert value.item() == pytest.approx(float(expected), rel=1e-9)


def test_model_contrast_of_nearly_equal_features_in_bfloat16() -> None:
    drawn = torch.Generator().manual_seed(0)
    z = torch.randn(64, 256, generator=drawn)
    others = [(z + 0.05 * torch.randn(64, 256, generator=drawn)).bfloat16() for _ in range(2)]

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        anchor = z.bfloat16().to(dtype).requires_grad_()
        model_contrastive_loss(anchor, *(other.to(dtype) for other in others)).backward()
        assert anchor.grad is not None
        return anchor.grad.double()

    exact = gradient(torch.float64)
    assert (gradient(torch.bfloat16) - exact).norm() < 0.003 * exact.norm()  # with cosines in bfloat16 it is 0.028


def test_model_contrast_gradient() -> None:
    inputs = tuple(numbers(B, D, seed=seed, grad=True) for seed in range(3))
    assert torch.autograd.gradcheck(model_contrastive_loss, inputs)
