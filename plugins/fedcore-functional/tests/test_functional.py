"""The shared mathematics under other dtypes, autocast, compilation and tracing, and its doctests."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedcore_functional import (
    class_means,
    classes,
    contrast,
    drift,
    linear_term,
    model_contrastive_loss,
    prototype_contrastive_loss,
    proximal_term,
    terms,
)
from tests.drawn import LABELS, B, C, D, numbers


def test_doctests() -> None:
    results = [doctest.testmod(module) for module in (classes, contrast, drift, terms)]
    assert sum(result.attempted for result in results) > 8
    assert not any(result.failed for result in results)


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


@pytest.mark.sampled(4)
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
