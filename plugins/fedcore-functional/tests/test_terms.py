"""Terms on parameters against NumPy, with exact gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcore_functional import effective_steps, linear_term, moved_model, proximal_term, update_vector
from tests.drawn import numbers
from tests.sentences import raises

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
def test_parameter_terms_of_several_clients_under_vmap(term: Callable[..., Tensor]) -> None:
    clients = [(tensors(2 * k, grad=True), tensors(2 * k + 1)) for k in range(3)]
    stacks = [[torch.stack(column) for column in zip(*lists)] for lists in zip(*clients)]  # (3, ...) each
    values = torch.func.vmap(term)(*stacks)
    plain = [term(*lists) for lists in clients]
    torch.testing.assert_close(values, torch.stack(plain), rtol=1e-12, atol=0)
    own = [p for a, _ in clients for p in a]
    found, expected = (torch.autograd.grad(total, own) for total in (values.sum(), torch.stack(plain).sum()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    shared = torch.func.vmap(term, in_dims=(0, None))(stacks[0], clients[0][1])  # the same reference for all
    torch.testing.assert_close(shared, torch.stack([term(a, clients[0][1]) for a, _ in clients]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("term", [proximal_term, linear_term])
def test_parameter_terms_of_no_or_unequal_lists(term: Callable[..., Tensor]) -> None:
    assert term([], []).item() == 0
    with raises(ValueError, "4", "3"):
        term(tensors(1), tensors(2)[:3])
    with raises(ValueError, "0", "3", "2"):
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
        with raises(ValueError, steps if steps < 0 else momentum):
            effective_steps(steps, momentum)


@pytest.mark.parametrize("layouts", [("channels_last", "channels_last"), ("channels_last", "contiguous_format")])
def test_linear_term_does_not_mind_how_tensors_lie_in_memory(layouts):
    a, b = torch.randn(2, 4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = (t.contiguous(memory_format=getattr(torch, name)) for t, name in zip((a, b), layouts, strict=True))
    a.requires_grad_()
    value = linear_term([a], [b])
    value.backward()
    assert value.item() == pytest.approx(float((a.detach() * b).sum()), rel=1e-12)
    torch.testing.assert_close(a.grad, b)


def test_an_update_as_a_vector_and_back():
    start = {
        "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "b": torch.tensor([5.0], dtype=torch.float64),
        "c": torch.ones(1),
    }
    model = {"a": torch.tensor([[1.5, 2.0], [3.0, 3.0]]), "b": torch.tensor([7.0], dtype=torch.float64)}
    vector = update_vector(model, start, ["b", "a"])
    assert vector.dtype == torch.float64
    assert vector.tolist() == [2.0, 0.5, 0.0, 0.0, -1.0]
    back = moved_model(start, vector, ["b", "a"])
    assert back.keys() == model.keys()
    for name, tensor in model.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
