"""The mathematics the methods share: pure functions on tensors, nothing about clients, rounds or plugins.

Float inputs keep their dtype (float64 in, float64 out). Unless its docstring says otherwise a function is
capture-safe: no host synchronisation, no shape that depends on values, no Python branch on tensor values, so
that a training step that calls it can be compiled or recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = [
    "ReadyPrototypes",
    "class_means",
    "class_statistics",
    "contrast_with",
    "cosine_similarity_matrix",
    "effective_steps",
    "linear_term",
    "model_contrastive_loss",
    "prototype_contrastive_loss",
    "proximal_term",
    "ready_prototypes",
]

_IGNORED = -100  # cross-entropy's own default

MIN_NORM = 1e-8
"""Vectors shorter than this count as having this length in a cosine (PyTorch's and MOON's epsilon)."""


# --- cosines and contrast -----------------------------------------------------------------------------------


def cosine_similarity_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of every row of ``a`` with every row of ``b``.

    ``a`` (..., n, d) and ``b`` (..., m, d) give (..., n, m), in the wider of their two float dtypes. Norms
    are clamped at 1e-8, so a zero vector has cosine 0 with everything and a finite gradient.

    >>> cosine_similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.0000]])
    """
    return _matmul(_unit(a), _unit(b).mT)


def prototype_contrastive_loss(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    *,
    temperature: float = 1.0,
    known: Tensor | None = None,
    denominator: Literal["all", "others"] = "all",
) -> Tensor:
    r"""Return the mean of :math:`-\log(e^{\cos(z, c_y)/\tau} / \sum_k e^{\cos(z, c_k)/\tau})`, k known.

    ``features`` z (B, d), integer ``labels`` y (B,), ``prototypes`` c (C, d), ``known`` (C,) bool (or counts,
    where 0 means unknown; None: all are known); the result has shape (). ``denominator="others"`` leaves the
    sample's own class out of the sum. A sample contributes 0, but still counts in the mean, if its class is
    unknown (or outside 0..C-1) or if its sum would be empty. What stands in the rows of unknown prototypes,
    even NaN, does not matter.

    :raises ValueError: the temperature is not positive, or ``denominator`` is neither of the two.
    :source: FedProc (Mu et al. 2021), Eq. 4: temperature 1; FedECCR (Zeng et al.), Algorithm 1 line 16:
        "all", Eq. 1: "others" (its printed form lost the minus sign).

    >>> z, c = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    >>> prototype_contrastive_loss(z, torch.tensor([0]), c)  # log(1 + 1/e)
    tensor(0.3133)
    >>> prototype_contrastive_loss(z, torch.tensor([0]), c, denominator="others")  # 0 - 1
    tensor(-1.)
    """
    ready = ready_prototypes(prototypes, temperature=temperature, known=known)
    return contrast_with(features, labels, ready, denominator=denominator)


class ReadyPrototypes(NamedTuple):
    """Prototypes as :func:`contrast_with` wants them, made once for all batches of a round.

    :param directions: unit vectors over the temperature, (C, d); 0 where unknown.
    :param known: (C,) bool; ``offset`` (C,) is -inf where a class stays out of the sums, None: all are known.
    :param targets: class + 1 -> class, or what cross-entropy ignores: (C + 2,) int64, unknown at both ends.
    """

    directions: Tensor
    known: Tensor
    offset: Tensor | None
    targets: Tensor


def ready_prototypes(prototypes: Tensor, *, temperature: float = 1.0, known: Tensor | None = None) -> ReadyPrototypes:
    """Return prototypes ready for many batches; arguments as of :func:`prototype_contrastive_loss`.

    :raises ValueError: the temperature is not positive.
    """
    _check_temperature(temperature)
    classes = torch.arange(len(prototypes), device=prototypes.device)
    if known is None:
        held, offset = torch.ones_like(classes, dtype=torch.bool), None
    else:
        held = known.bool()
        # An unknown row may hold anything; zeroing its gradient alone would not stop 0 * NaN.
        prototypes = torch.where(held.unsqueeze(1), prototypes, 0.0)
        # Where no class is known no target is: a row of -inf would leave NaN in its gradient.
        offset = torch.zeros_like(classes, dtype=prototypes.dtype).masked_fill(~held & held.any(), -torch.inf)
    targets = F.pad(torch.where(held, classes, _IGNORED), (1, 1), value=_IGNORED)
    return ReadyPrototypes(_unit(prototypes) / temperature, held, offset, targets)


def contrast_with(
    features: Tensor, labels: Tensor, ready: ReadyPrototypes, *, denominator: Literal["all", "others"] = "all"
) -> Tensor:
    """Return :func:`prototype_contrastive_loss` of a batch: ``features`` (B, d), ``labels`` (B,); shape ().

    :raises ValueError: ``denominator`` is neither of the two.
    """
    if denominator not in ("all", "others"):
        raise ValueError(f"denominator must be 'all' or 'others', got {denominator!r}")
    # cos(z, c) / tau. Dividing (B, C) cosines takes less than dividing (B, d) features, forth and back.
    logits = _matmul(features, ready.directions.mT) / _norms(features)  # (B, C)
    if denominator == "all":
        if ready.offset is not None:
            logits = logits + ready.offset
        targets = ready.targets[(labels + 1).clamp(0, len(ready.known) + 1)]  # (B,)
        return F.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="sum") / len(labels)
    own = _membership(labels, len(ready.known))  # (B, C)
    mine, others = ready.known & own, ready.known & ~own  # (B, C)
    active = mine.any(1) & others.any(1)  # (B,)
    # Inactive rows sum over all classes before they are dropped: log(0) would leave NaN in their gradient.
    log_sum = logits.masked_fill(~others & active.unsqueeze(1), -torch.inf).logsumexp(1)  # (B,)
    positive = torch.where(own, logits, 0.0).sum(1)  # (B,)
    return torch.where(active, log_sum - positive, 0.0).mean()


def model_contrastive_loss(anchor: Tensor, positive: Tensor, negative: Tensor, *, temperature: float = 0.5) -> Tensor:
    r"""Return the mean of :math:`-\log(e^{s_p/\tau} / (e^{s_p/\tau} + e^{s_n/\tau}))`.

    s_p and s_n are the cosines of the anchor with positive and negative, all three (B, d); the result has
    shape (). Computed as softplus((s_n - s_p) / tau), which cannot overflow. Equal positive and negative give
    log 2 and no gradient.

    :raises ValueError: the temperature is not positive.
    :source: MOON (Li, He, Song, CVPR 2021, arXiv 2103.16257), Eq. 3: anchor = the local model's z, positive =
        the global model's, negative = the client's previous model's.

    >>> z, of_global, of_previous = torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]], [[0.0, 1.0]]])
    >>> model_contrastive_loss(z, of_global, of_previous)
    tensor(0.2633)
    """
    _check_temperature(temperature)
    unit = _unit(anchor)
    near, far = (unit * _unit(positive)).sum(-1), (unit * _unit(negative)).sum(-1)  # (B,) each
    return F.softplus((far - near) / temperature).mean()


# --- terms on parameters ------------------------------------------------------------------------------------


def proximal_term(parameters: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return half the squared Euclidean distance between two equally long lists of equally shaped tensors.

    The result has shape (); its gradient is ``parameters - reference``, exactly 0 (not NaN) where they agree.
    It is one node of the autograd graph, however many tensors there are. Empty lists give 0.

    :raises ValueError: the lists or two of their tensors differ in length or shape.
    :source: FedProx (Li et al., MLSys 2020, arXiv 1812.06127), Eq. 2, without the factor mu.

    >>> proximal_term([torch.tensor([3.0, 4.0])], [torch.zeros(2)])
    tensor(12.5000)
    """
    _check_lists("parameters", parameters, "reference", reference)
    return _apply(_HalfSquaredDistance, parameters, reference)


def linear_term(parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two equally long lists of equally shaped tensors.

    The result has shape (); its gradient is ``directions``: this is how a method adds a constant correction
    to every gradient. It is one node of the autograd graph, however many tensors there are. Empty lists
    give 0.

    :raises ValueError: the lists or two of their tensors differ in length or shape.
    :source: the loss form of SCAFFOLD's correction c - c_i (Karimireddy et al., ICML 2020, arXiv 1910.06378).

    >>> weights = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    >>> linear_term(weights, [torch.tensor([10.0, 1.0]), torch.tensor(-1.0)])
    tensor(9.)
    """
    _check_lists("parameters", parameters, "directions", directions)
    return _apply(_InnerProduct, parameters, directions)


def effective_steps(steps: int, momentum: float) -> float:
    r"""Return :math:`A(K) = \sum_{j=1}^{K} (1-\rho^j)/(1-\rho)`: how far K SGD steps with momentum go.

    K equal gradients g move the weights by lr * A(K) * g (PyTorch's SGD, dampening 0, buffer made anew). No
    momentum gives K, momentum 1 gives K (K+1) / 2.

    :raises ValueError: ``steps`` is negative or ``momentum`` outside [0, 1].
    :source: algebra; SCAFFOLD's Option II and FedNova divide by it.

    >>> effective_steps(3, 0.0), round(effective_steps(3, 0.9), 12), effective_steps(3, 1.0)
    (3.0, 5.61, 6.0)
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")
    if not 0.0 <= momentum <= 1.0:
        raise ValueError(f"momentum must lie in [0, 1], got {momentum}")
    # The recurrence itself: the closed form divides by (1 - rho)^2 and loses all digits as rho nears 1.
    velocity = distance = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        distance += velocity
    return distance


# --- statistics by class ------------------------------------------------------------------------------------


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's mean feature (C, d), 0 where the class is absent, and its count (C,), int64.

    ``features`` (B, d) float, ``labels`` (B,) integer; labels outside 0..C-1 belong to no class. The counts
    are the mask: a mean whose count is 0 says nothing and must not enter an average. Differentiable in
    ``features``.

    The sums are a product with the one-hot labels, not ``index_add_``: that adds atomically, in any order, on
    CUDA, while this repeats its bits on CPU and GPU, forwards and backwards. (Its price: one non-finite
    feature spoils all classes.)

    :source: FedProc, Eq. 5; FedECCR, Eq. 2.

    >>> class_means(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 0, 2]), 3)
    (tensor([[2., 3.],
            [0., 0.],
            [5., 6.]]), tensor([2, 0, 1]))
    """
    members = _membership(labels, num_classes)  # (B, C)
    counts = members.sum(0)  # (C,)
    sums = _matmul(members.to(features.dtype).mT, features)  # (C, B) @ (B, d) -> (C, d)
    return sums / counts.clamp(min=1).to(features.dtype).unsqueeze(1), counts


def class_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each class's count (C,) int64, mean (C, d) and covariance (C, d, d), both float64.

    ``features`` (n, d) of any float dtype, ``labels`` (n,) in 0..C-1. Covariances have the denominator
    n_c - 1 and are 0 where n_c is 0 or 1; means are 0 where n_c is 0. No gradient.

    Not for use within a training step: it reads the counts on the host, so as to touch each sample only in
    its own class (n d^2 operations instead of C n d^2).

    :raises ValueError: a label lies outside 0..C-1.
    :source: FedECCR, Eqs. 4, 5; CCVR (Luo et al., NeurIPS 2021, arXiv 2106.05001).

    >>> features, labels = torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1])
    >>> counts, means, covariances = class_statistics(features, labels, 2)
    >>> counts.tolist(), means.tolist(), covariances.tolist()
    ([2, 1], [[1.0], [4.0]], [[[2.0]], [[0.0]]])
    """
    order = labels.argsort(stable=True)
    features = features.detach()[order].double()  # (n, d), class by class
    counts = _membership(labels, num_classes).sum(0)  # (C,)
    sizes: list[int] = counts.tolist()
    if sum(sizes) != len(labels):
        raise ValueError(f"labels must lie in 0..{num_classes - 1}, got {labels.min()}..{labels.max()}")
    d = features.shape[1]
    means = features.new_zeros(num_classes, d)
    covariances = features.new_zeros(num_classes, d, d)
    for label, members in enumerate(torch.split(features, sizes)):  # members (n_c, d)
        if len(members) > 0:
            means[label] = members.mean(0)
        if len(members) > 1:
            centred = members - means[label]
            covariances[label] = centred.mT @ centred / (len(members) - 1)
    return counts, means, covariances


# --- what the above is made of ------------------------------------------------------------------------------


class _HalfSquaredDistance(torch.autograd.Function):
    """1/2 |a - b|^2 over the two halves of its arguments.

    The inputs are saved, not the differences: they live anyway, so a step holds no second model between
    forward and backward, and the gradient is itself differentiable.
    """

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        # Tensor by tensor, without temporaries: on CPU a foreach writes a whole model first, 3x slower.
        distances = [torch.dist(a, b) for a, b in zip(*_halves(tensors))]
        return torch.stack(distances).square().sum() / 2

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = _halves(ctx.saved_tensors)
        towards_first = torch._foreach_sub(first, second)
        torch._foreach_mul_(towards_first, grad)
        if not any(ctx.needs_input_grad[len(first) :]):
            return (*towards_first, *[None] * len(second))
        return (*towards_first, *torch._foreach_neg(towards_first))


class _InnerProduct(torch.autograd.Function):
    """<a, b> over the two halves of its arguments."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        products = [torch.dot(*_flat(a, b)) for a, b in zip(*_halves(tensors))]
        return torch.stack(products).sum()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = _halves(ctx.saved_tensors)
        towards_first = [b * grad for b in second]
        if not any(ctx.needs_input_grad[len(first) :]):
            return (*towards_first, *[None] * len(second))
        return (*towards_first, *[a * grad for a in first])


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as vectors in one common order, without a copy where they lie alike in memory."""
    if a.ndim == 4 and a.stride() == b.stride() and a.is_contiguous(memory_format=torch.channels_last):
        return a.permute(0, 2, 3, 1).flatten(), b.permute(0, 2, 3, 1).flatten()
    return a.flatten(), b.flatten()


def _halves(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    middle = len(tensors) // 2
    return list(tensors[:middle]), list(tensors[middle:])


def _apply(function: type[torch.autograd.Function], first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    if not first:  # every parameter may be personal or frozen
        return torch.zeros(())
    value: Tensor = function.apply(*first, *second)
    return value


def _check_lists(name: str, first: Sequence[Tensor], other: str, second: Sequence[Tensor]) -> None:
    if len(first) != len(second):
        raise ValueError(f"{name} and {other} must be equally long, got {len(first)} and {len(second)} tensors")
    for index, (a, b) in enumerate(zip(first, second)):
        if a.shape != b.shape:  # would broadcast silently
            raise ValueError(f"{name}[{index}] is {tuple(a.shape)}, but {other}[{index}] is {tuple(b.shape)}")


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _membership(labels: Tensor, num_classes: int) -> Tensor:
    """Return the one-hot labels, (B,) -> (B, C) bool; ``F.one_hot`` checks its labels on the host."""
    return labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)


def _unit(x: Tensor) -> Tensor:
    return x / _norms(x)


def _norms(x: Tensor) -> Tensor:
    """Return the rows' lengths, (..., d) -> (..., 1), clamped."""
    # float16 cannot hold 1e-8: its least normal number takes its place.
    least = max(MIN_NORM, torch.finfo(x.dtype).tiny)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norms.clamp(min=least)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in the wider of the two dtypes; autocast would round cosines and means to 16 bits."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    with torch.autocast(device_type=a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)
