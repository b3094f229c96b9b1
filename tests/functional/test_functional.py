"""The shared maths against independent NumPy references in float64, hand cases, and safety under masks."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedcore.functional import (
    class_means,
    class_statistics,
    classes,
    contrast,
    cosine_similarity_matrix,
    effective_steps,
    linear_term,
    model_contrastive_loss,
    prototype_contrastive_loss,
    proximal_term,
    terms,
)

B, C, D = 12, 5, 7


def numbers(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


LABELS = torch.tensor([0, 0, 1, 3, 3, 3, 1, 0, 0, 1, 3, 4])  # class 2 absent, class 4 a single sample


def test_doctests() -> None:
    results = [doctest.testmod(module) for module in (classes, contrast, terms)]
    assert sum(result.attempted for result in results) > 8
    assert not any(result.failed for result in results)


# --- NumPy references ---------------------------------------------------------------------------------------


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


# --- cosines and contrast -----------------------------------------------------------------------------------


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


def test_a_label_outside_the_classes_contributes_nothing() -> None:
    z, prototypes = numbers(4, D), numbers(C, D, seed=1)
    value = prototype_contrastive_loss(z, torch.tensor([0, 1, C, -1]), prototypes)
    inside = prototype_contrastive_loss(z[:2], torch.tensor([0, 1]), prototypes)
    assert value.item() == pytest.approx(inside.item() / 2)


def test_wrong_options_are_refused() -> None:
    z = numbers(B, D)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        prototype_contrastive_loss(z, LABELS, numbers(C, D), temperature=0)
    with pytest.raises(ValueError, match="temperature must be positive, got -1"):
        model_contrastive_loss(z, z, z, temperature=-1)
    with pytest.raises(ValueError, match="'all' or 'others', got 'other'"):
        prototype_contrastive_loss(z, LABELS, numbers(C, D), denominator="other")  # type: ignore[arg-type]


def test_model_contrast_by_hand() -> None:
    # baselines.md section 3, computed there with NumPy
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


def test_model_contrast_gradient() -> None:
    inputs = tuple(numbers(B, D, seed=seed, grad=True) for seed in range(3))
    assert torch.autograd.gradcheck(model_contrastive_loss, inputs)


# --- terms on parameters ------------------------------------------------------------------------------------

SHAPES = [(3, 2), (), (4,), (2, 1, 3)]


def tensors(seed: int, grad: bool = False) -> list[Tensor]:
    return [numbers(*shape, seed=10 * seed + i, grad=grad) for i, shape in enumerate(SHAPES)]


def test_parameter_terms_equal_numpy() -> None:
    a, b = tensors(1), tensors(2)
    flat_a, flat_b = (np.concatenate([t.numpy().ravel() for t in list_]) for list_ in (a, b))
    assert proximal_term(a, b).item() == pytest.approx(0.5 * float(((flat_a - flat_b) ** 2).sum()), rel=1e-14)
    assert linear_term(a, b).item() == pytest.approx(float(flat_a @ flat_b), rel=1e-13)
    assert proximal_term(a, b).shape == linear_term(a, b).shape == ()
    assert proximal_term(a, b).dtype == linear_term(a, b).dtype == torch.float64


def test_parameter_gradients_are_exact() -> None:
    a, b = tensors(1, grad=True), tensors(2)
    grads = torch.autograd.grad(0.5 * proximal_term(a, b), a)
    assert all(torch.equal(grad, 0.5 * (x - y)) for grad, x, y in zip(grads, a, b))
    grads = torch.autograd.grad(-2 * linear_term(a, b), a)
    assert all(torch.equal(grad, -2 * y) for grad, y in zip(grads, b))


def test_proximal_gradient_at_the_reference_is_zero() -> None:
    a = tensors(1, grad=True)
    value = proximal_term(a, [t.detach().clone() for t in a])
    assert value.item() == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in torch.autograd.grad(value, a))


@pytest.mark.parametrize("term", [proximal_term, linear_term])
def test_parameter_terms_pass_gradcheck_in_both_lists(term: Callable[..., Tensor]) -> None:
    def of_flat_list(*both: Tensor) -> Tensor:
        return term(both[:4], both[4:])

    both = (*tensors(1, grad=True), *tensors(2, grad=True))
    assert torch.autograd.gradcheck(of_flat_list, both)
    assert torch.autograd.gradgradcheck(of_flat_list, both)


@pytest.mark.parametrize("term", [proximal_term, linear_term])
def test_parameter_terms_take_memory_formats_and_many_tensors(term: Callable[..., Tensor]) -> None:
    plain, other = numbers(2, 3, 4, 5, grad=True), numbers(2, 3, 4, 5, seed=1)
    mixed = plain.detach().to(memory_format=torch.channels_last).requires_grad_()
    expected, value = term([plain] * 100, [other] * 100), term([mixed] * 100, [other] * 100)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(v, p)[0] for v, p in ((value, mixed), (expected, plain))))


@pytest.mark.parametrize("term", [proximal_term, linear_term])
def test_parameter_terms_are_one_node(term: Callable[..., Tensor]) -> None:
    a = tensors(1, grad=True)
    value = term(a, tensors(2))  # kept alive: torch 2.6 drops the node with it
    node = value.grad_fn
    assert node is not None
    leaves = [parent for parent, _ in node.next_functions if parent is not None]
    assert [type(leaf).__name__ for leaf in leaves] == ["AccumulateGrad"] * len(a)


@pytest.mark.parametrize("term", [proximal_term, linear_term])
def test_parameter_terms_of_no_or_unequal_lists(term: Callable[..., Tensor]) -> None:
    assert term([], []).item() == 0
    with pytest.raises(ValueError, match="4 and 3 tensors"):
        term(tensors(1), tensors(2)[:3])
    with pytest.raises(ValueError, match=r"parameters\[0\] is \(3, 2\)"):
        term([torch.ones(3, 2)], [torch.ones(2)])


@pytest.mark.parametrize("steps", [0, 1, 3, 50])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_is_the_closed_form(steps: int, momentum: float) -> None:
    expected = sum((1 - momentum**j) / (1 - momentum) for j in range(1, steps + 1))
    assert effective_steps(steps, momentum) == pytest.approx(expected, rel=1e-12)


def test_effective_steps_is_how_far_sgd_goes() -> None:
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(7):
        weight.grad = torch.tensor(-1.0, dtype=torch.float64)
        optimizer.step()
    assert weight.item() == pytest.approx(0.1 * effective_steps(7, 0.9), rel=1e-12)


def test_effective_steps_limits() -> None:
    assert effective_steps(3, 0.9) == pytest.approx(5.61, abs=1e-12)
    assert effective_steps(7, 0.0) == 7
    assert effective_steps(100, 1.0) == 5050
    assert effective_steps(100, 1 - 1e-12) == pytest.approx(5050, rel=1e-9)
    for steps, momentum in [(-1, 0.5), (3, 1.1), (3, -0.1), (3, math.nan)]:
        with pytest.raises(ValueError, match="must"):
            effective_steps(steps, momentum)


# --- statistics by class ------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"0\.\.1, got 0\.\.2"):
        class_statistics(far, torch.tensor([0, 2]), 2)
    counts, means, covariances = class_statistics(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 2)
    assert not any(statistic.any() for statistic in (counts, means, covariances))


# --- dtypes, capture ----------------------------------------------------------------------------------------

KNOWN = torch.tensor([True, False, True, True, True])
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "prototype": lambda x, y, z: prototype_contrastive_loss(x, LABELS, y[:C], known=KNOWN),
    "prototype-all-known": lambda x, y, z: prototype_contrastive_loss(x, LABELS, y[:C]),
    "prototype-others": lambda x, y, z: prototype_contrastive_loss(
        x, LABELS, y[:C], known=KNOWN, denominator="others", temperature=0.5
    ),
    "model-contrast": model_contrastive_loss,
    "proximal": lambda x, y, z: proximal_term([x, z], [y, y + 1]),
    "linear": lambda x, y, z: linear_term([x, z], [y, y + 1]),
    "class-means": lambda x, y, z: class_means(x, LABELS, C)[0].square().sum(),
}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x, y, z = (numbers(B, D, seed=seed).to(dtype) for seed in range(3))
    return x.requires_grad_(), y, z.requires_grad_()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_keep_the_dtype(name: str, dtype: torch.dtype) -> None:
    value = LOSSES[name](*inputs(dtype))
    assert value.dtype == dtype
    exact = LOSSES[name](*(t.double() for t in inputs(dtype)))
    assert value.item() == pytest.approx(exact.item(), rel=0.05 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_does_not_round(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = LOSSES[name](*inputs(torch.float32))
    assert torch.equal(value, LOSSES[name](*inputs(torch.float32)))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_compile_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    loss = LOSSES[name]
    x, y, z = inputs()
    expected = loss(x, y, z)
    value = torch.compile(loss, fullgraph=True, backend="eager")(x, y, z)
    torch.testing.assert_close(value, expected)
    for got, wanted in zip(
        torch.autograd.grad(value, [x, z], allow_unused=True),
        torch.autograd.grad(expected, [x, z], allow_unused=True),
    ):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_trace_without_reading_values(name: str) -> None:
    def step(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        value = LOSSES[name](x, y, z)
        grads = torch.autograd.grad(value, [x, z], allow_unused=True)
        return [value, *(grad for grad in grads if grad is not None)]

    # Fake tensors have no values: .item(), boolean indexing or a branch on them raise here.
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs())
    assert not any("_local_scalar_dense" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced(*inputs()), step(*inputs()))


@pytest.mark.parametrize("layouts", [("channels_last", "channels_last"), ("channels_last", "contiguous_format")])
def test_linear_term_does_not_mind_how_tensors_lie_in_memory(layouts):
    a, b = torch.randn(2, 4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = (t.contiguous(memory_format=getattr(torch, name)) for t, name in zip((a, b), layouts, strict=True))
    a.requires_grad_()
    value = linear_term([a], [b])
    value.backward()
    assert value.item() == pytest.approx(float((a.detach() * b).sum()), rel=1e-12)
    torch.testing.assert_close(a.grad, b)
