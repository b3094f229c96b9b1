"""DP-SGD's mathematics: gradients of single examples, their clipped sum and its noised mean.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, CCS 2016, arXiv 1607.00133, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedcore import SplitModel, Tensors
from fedcore_functional import VmapRules, as_parameters

Gradients = Mapping[str, Tensor]
"""Gradients of B examples by parameter, (B, ...) each."""

MOST_NUMBERS = 1 << 24
"""Numbers of gradients that are held at once: 64 MB."""


def one_pass(model: SplitModel, names: Iterable[str], x: Tensor, y: Tensor) -> Iterator[Gradients]:
    """Yield the gradients of the examples' cross-entropies, in parts that fit in memory.

    Every example has weights of its own, which are views of the model's: one forward and one backward pass do.

    :param x: inputs (B, ...). :param y: labels (B,).
    """
    own = {name: model.get_parameter(name) for name in names}
    rows = max(1, MOST_NUMBERS // sum(weight.numel() for weight in own.values()))

    def logits(weights: Mapping[str, Tensor], example: Tensor) -> Tensor:
        as_parameters(weights, weights)
        batch: Tensor = functional_call(model, dict(weights), (example[None],)).logits
        return batch[0]

    for inputs, labels in zip(x.split(rows), y.split(rows), strict=True):
        with torch.enable_grad():
            every = {name: weight.detach().expand(len(inputs), *weight.shape) for name, weight in own.items()}
            weights = {name: weight.requires_grad_() for name, weight in every.items()}
            with VmapRules(own.values()):
                outputs = vmap(logits, randomness="different")(weights, inputs)
            total = F.cross_entropy(outputs, labels, reduction="sum")
            gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
        yield {name: gradient for name, gradient in zip(weights, gradients, strict=True) if gradient is not None}


def pass_by_pass(gradients_at: Callable[..., Mapping[str, Tensor]], count: int) -> Iterator[Gradients]:
    """Yield the gradients of the whole objective on one example after the other: a pass each.

    :param gradients_at: ``step.gradients_at``. :param count: the examples in the batch.
    """
    for row in range(count):
        gradients = gradients_at({}, slice(row, row + 1))
        yield {name: gradient[None] for name, gradient in gradients.items()}


def clipped_sum(parts: Iterable[Gradients], bound: float) -> Tensors:
    r"""Return :math:`\sum_i g_i / \max(1, \|g_i\|_2 / C)` by name, with the norm of all parameters together.

    :source: Algorithm 1, "clip gradient".

    >>> clipped_sum([{"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}], 1.0)["w"]
    tensor([0.9000, 1.2000])
    """
    total: Tensors = {}
    for part in parts:
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1, dtype=torch.float64) for g in part.values()]
        factors = (bound / torch.linalg.vector_norm(torch.stack(norms), dim=0)).clamp(max=1.0)  # of norm 0: inf, so 1
        for name, gradient in part.items():
            wide = torch.promote_types(gradient.dtype, torch.float32)  # a sum in bfloat16 rounds further than the bound
            clipped = torch.tensordot(factors.to(wide), gradient.to(wide), dims=1)
            total[name] = total[name] + clipped if name in total else clipped
    return total


def noised_mean(total: Tensor | float, noise: Tensor, noise_multiplier: float, bound: float, lot: float) -> Tensor:
    r"""Return :math:`\tilde g = \frac{1}{L} (\sum_i \bar g_i + N(0, z^2 C^2 I))`.

    :param lot: L, the examples in a batch, or on average in a sampled one; the divisor whatever came.
    :source: Algorithm 1, "add noise".

    >>> noised_mean(torch.tensor([3.0]), torch.tensor([0.5]), 2.0, 4.0, 2)
    tensor([3.5000])
    """
    return (total + noise_multiplier * bound * noise) / lot
