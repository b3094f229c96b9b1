"""Terms of a local objective on the parameters, a client's mean loss, the steps of SGD, and updates as vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def mean_loss(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    """Return the mean of a task's loss over samples, taken in batches as in training, shape ().

    A loss that looks at all samples of a batch, as Cox's does, would be larger for more of them.

    :param loss: of logits (n, ...) and labels (n, ...), its mean over the n; ``client.task.loss``.
    :param logits: at least one row; they are converted to float64.

    >>> mean_loss(lambda z, y: (z - y).mean(), torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1.0, 1.0, 1.0]), 2)
    tensor(3., dtype=torch.float64)
    """
    batches = zip(logits.double().split(batch_size), labels.split(batch_size), strict=True)
    return torch.stack([loss(z, y) * len(y) for z, y in batches]).sum() / len(labels)


def proximal_term(parameters: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return half the squared Euclidean distance between two equally long lists of equally shaped tensors.

    The result has shape (). Its gradient is ``parameters - reference``, exactly 0 (not NaN) where they agree. It is one
    node of the autograd graph, however many tensors there are. Empty lists give 0.

    :raises ValueError: the lists or two of their tensors differ in length or shape.
    :source: FedProx (Li et al., MLSys 2020, arXiv 1812.06127), Eq. 2, without the factor mu.

    >>> proximal_term([torch.tensor([3.0, 4.0])], [torch.zeros(2)])
    tensor(12.5000)
    """
    _check_lists("parameters", parameters, "reference", reference)
    return _apply(_HalfSquaredDistance, parameters, reference)


def linear_term(parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two equally long lists of equally shaped tensors.

    The result has shape (). Its gradient is ``directions``: so a method adds a constant correction to every gradient.
    It is one node of the autograd graph, however many tensors there are. Empty lists give 0.

    :raises ValueError: the lists or two of their tensors differ in length or shape.
    :source: the loss form of SCAFFOLD's correction c - c_i (Karimireddy et al., ICML 2020, arXiv 1910.06378).

    >>> weights = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    >>> linear_term(weights, [torch.tensor([10.0, 1.0]), torch.tensor(-1.0)])
    tensor(9.)
    """
    _check_lists("parameters", parameters, "directions", directions)
    return _apply(_InnerProduct, parameters, directions)


def effective_steps(steps: int, momentum: float) -> float:
    r"""Return :math:`A(K) = \sum_{j=1}^{K} (1-\rho^j)/(1-\rho)`: the effective number of K SGD steps with momentum.

    K equal gradients g move the weights by lr * A(K) * g (PyTorch's SGD, dampening 0, from an empty buffer). A(K) is K
    without momentum, and K (K+1) / 2 with momentum 1.

    :raises ValueError: ``steps`` is negative or ``momentum`` outside [0, 1].
    :source: algebra; SCAFFOLD's Option II and FedNova divide by it.

    >>> effective_steps(3, 0.0), round(effective_steps(3, 0.9), 12), effective_steps(3, 1.0)
    (3.0, 5.61, 6.0)
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")
    if not 0.0 <= momentum <= 1.0:
        raise ValueError(f"momentum must lie in [0, 1], got {momentum}")
    # The closed form divides by (1 - rho)^2 and loses all digits as rho nears 1.
    velocity = distance = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        distance += velocity
    return distance


class _OfHalves(torch.autograd.Function):
    """A function of two lists, the halves of its arguments.

    It saves its inputs, which exist anyway, instead of intermediate results. So a step holds no second model between
    forward and backward, and the gradient is differentiable. Under ``torch.func.vmap`` each value is computed by
    :meth:`one`, of operations that ``vmap`` knows.
    """

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @classmethod
    def vmap(cls, info: Any, dims: Sequence[int | None], *tensors: Tensor) -> tuple[Tensor, int]:
        """Return the function of each of several pairs of lists, (K,), and the dimension of K."""
        return torch.func.vmap(cls.one, in_dims=tuple(dims))(*tensors), 0

    @staticmethod
    def one(*tensors: Tensor) -> Tensor:
        """Return the function of operations that autograd knows."""
        raise NotImplementedError


class _HalfSquaredDistance(_OfHalves):
    """1/2 |a - b|^2."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        # One tensor at a time needs no temporaries. On a CPU foreach writes a whole model first: 3 times slower.
        distances = [torch.dist(a, b) for a, b in zip(*_halves(tensors))]
        return torch.stack(distances).square().sum() / 2

    @staticmethod
    def one(*tensors: Tensor) -> Tensor:
        return torch.stack([(a - b).square().sum() for a, b in zip(*_halves(tensors))]).sum() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = _halves(ctx.saved_tensors)
        towards_first = torch._foreach_sub(first, second)
        torch._foreach_mul_(towards_first, grad)
        if not any(ctx.needs_input_grad[len(first) :]):
            return (*towards_first, *[None] * len(second))
        return (*towards_first, *torch._foreach_neg(towards_first))


class _InnerProduct(_OfHalves):
    """<a, b>."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        products = [torch.dot(*_flat(a, b)) for a, b in zip(*_halves(tensors))]
        return torch.stack(products).sum()

    @staticmethod
    def one(*tensors: Tensor) -> Tensor:
        return torch.stack([(a * b).sum() for a, b in zip(*_halves(tensors))]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = _halves(ctx.saved_tensors)
        towards_first = [b * grad for b in second]
        if not any(ctx.needs_input_grad[len(first) :]):
            return (*towards_first, *[None] * len(second))
        return (*towards_first, *[a * grad for a in first])


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as vectors in the same order; no copy if their memory layouts agree."""
    if a.ndim == 4 and a.stride() == b.stride() and a.is_contiguous(memory_format=torch.channels_last):
        return a.permute(0, 2, 3, 1).flatten(), b.permute(0, 2, 3, 1).flatten()
    return a.flatten(), b.flatten()


def _halves(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    middle = len(tensors) // 2
    return list(tensors[:middle]), list(tensors[middle:])


def _apply(function: type[torch.autograd.Function], first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    if not first:  # so with a model whose parameters are all personal or frozen
        return torch.zeros(())
    value: Tensor = function.apply(*first, *second)
    return value


def _check_lists(name: str, first: Sequence[Tensor], other: str, second: Sequence[Tensor]) -> None:
    if len(first) != len(second):
        raise ValueError(f"{name} and {other} must be equally long, got {len(first)} and {len(second)} tensors")
    for index, (a, b) in enumerate(zip(first, second)):
        if a.shape != b.shape:  # would broadcast silently
            raise ValueError(f"{name}[{index}] is {tuple(a.shape)}, but {other}[{index}] is {tuple(b.shape)}")


def update_vector(model: Mapping[str, Tensor], start: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return y_k - w_t of these tensors as one vector, (d,) float64.

    :param model: a client's model y_k by name; ``start`` the model w_t from which it started.
    """
    return torch.cat([(model[name].double() - start[name].double()).flatten() for name in names])


def moved_model(start: Mapping[str, Tensor], vector: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return w_t plus a vector of :func:`update_vector`, by name and in the dtypes of w_t."""
    parts = vector.split([start[name].numel() for name in names])
    return {
        name: (start[name].double() + part.view(start[name].shape)).to(start[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }
