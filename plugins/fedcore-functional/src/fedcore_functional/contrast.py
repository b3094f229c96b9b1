"""Cosine similarities and contrastive losses."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcore_functional.arithmetic import matmul, membership

_IGNORED = -100  # cross-entropy's own default

MIN_NORM = 1e-8
"""Vectors shorter than this count as having this length in a cosine (PyTorch's and MOON's epsilon)."""


class UnitLength(nn.Module):
    """Scales features (B, d) to length 1. A zero vector stays zero."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the features divided by their lengths, (B, d)."""
        return F.normalize(features, dim=1, eps=max(1e-12, torch.finfo(features.dtype).tiny))  # 1e-12 is 0 in float16


def cosine_similarity_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of every row of ``a`` with every row of ``b``.

    ``a`` (..., n, d) and ``b`` (..., m, d) give (..., n, m), in the wider of their two float dtypes. Norms are clamped
    at 1e-8: a zero vector has cosine 0 with everything, and a finite gradient.

    >>> cosine_similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.0000]])
    """
    # Dividing (n, m) products is cheaper than dividing the rows of a, forward and backward.
    return matmul(a, _unit(b).mT) / _norms(a)


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

    ``features`` z (B, d), ``labels`` y (B,) in 0..C-1, ``prototypes`` c (C, d). The result has shape (). A sample
    contributes 0, but counts in the mean, if its class is unknown or its sum would be empty. The rows of unknown
    prototypes are ignored, even if they hold NaN.

    :param known: (C,) bool, or counts, where 0 means unknown. None: all are known.
    :param denominator: ``"others"`` leaves the sample's own class out of the sum.
    :raises ValueError: the temperature is not positive, or ``denominator`` is neither of the two.
    :source: FedProc (Mu et al. 2021), Eq. 4: temperature 1. FedECCR (Zeng et al.), Algorithm 1 line 16: ``"all"``, and
        Eq. 1: ``"others"`` (its printed form lost the minus sign).

    >>> z, c = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    >>> prototype_contrastive_loss(z, torch.tensor([0]), c)  # log(1 + 1/e)
    tensor(0.3133)
    >>> prototype_contrastive_loss(z, torch.tensor([0]), c, denominator="others")  # 0 - 1
    tensor(-1.)
    """
    ready = ready_prototypes(prototypes, temperature=temperature, known=known)
    return contrast_with(features, labels, ready, denominator=denominator)


class ReadyPrototypes(NamedTuple):
    """Prototypes prepared for :func:`contrast_with`, once for all batches of a round."""

    directions: Tensor
    """Unit vectors divided by the temperature, (C, d); 0 where unknown."""
    known: Tensor
    """(C,) bool."""
    offset: Tensor
    """What is added to the logits, (C,): -inf for classes outside the sums, else 0."""
    targets: Tensor
    """The target of each class, (C,) int64: the class itself, or cross-entropy's ignored index if it is unknown."""


def ready_prototypes(prototypes: Tensor, *, temperature: float = 1.0, known: Tensor | None = None) -> ReadyPrototypes:
    """Return prototypes prepared for many batches. Arguments as in :func:`prototype_contrastive_loss`.

    :raises ValueError: the temperature is not positive.
    """
    _check_temperature(temperature)
    classes = torch.arange(len(prototypes), device=prototypes.device)
    held = torch.ones_like(classes, dtype=torch.bool) if known is None else known.bool()
    # An unknown row may hold NaN; zeroing only its gradient would leave 0 * NaN.
    prototypes = torch.where(held.unsqueeze(1), prototypes, 0.0)
    # If no class is known there is no target: a row of -inf would give NaN in its gradient.
    offset = torch.zeros_like(classes, dtype=prototypes.dtype).masked_fill(~held & held.any(), -torch.inf)
    return ReadyPrototypes(_unit(prototypes) / temperature, held, offset, torch.where(held, classes, _IGNORED))


def contrast_with(
    features: Tensor, labels: Tensor, ready: ReadyPrototypes, *, denominator: Literal["all", "others"] = "all"
) -> Tensor:
    """Return :func:`prototype_contrastive_loss` of a batch: ``features`` (B, d), ``labels`` (B,) -> shape ().

    :raises ValueError: ``denominator`` is neither of the two.
    """
    if denominator not in ("all", "others"):
        raise ValueError(f"denominator must be 'all' or 'others', got {denominator!r}")
    # cos(z, c) / tau. Dividing (B, C) cosines is cheaper than dividing (B, d) features, forward and backward.
    logits = matmul(features, ready.directions.mT) / _norms(features)  # (B, C)
    if denominator == "all":
        targets = ready.targets[labels]  # (B,)
        return F.cross_entropy(logits + ready.offset, targets, ignore_index=_IGNORED, reduction="sum") / len(labels)
    own = membership(labels, len(ready.known))  # (B, C)
    mine, others = ready.known & own, ready.known & ~own  # (B, C)
    active = mine.any(1) & others.any(1)  # (B,)
    # Inactive rows sum over all classes before they are dropped: log(0) would give NaN in their gradient.
    log_sum = logits.masked_fill(~others & active.unsqueeze(1), -torch.inf).logsumexp(1)  # (B,)
    positive = torch.where(own, logits, 0.0).sum(1)  # (B,)
    return torch.where(active, log_sum - positive, 0.0).mean()


def model_contrastive_loss(anchor: Tensor, positive: Tensor, negative: Tensor, *, temperature: float = 0.5) -> Tensor:
    r"""Return the mean of :math:`-\log(e^{s_p/\tau} / (e^{s_p/\tau} + e^{s_n/\tau}))`.

    s_p and s_n are the cosines of the anchor with positive and negative, all three (B, d). The result has shape (). It
    is computed as softplus((s_n - s_p) / tau), which cannot overflow. Equal positive and negative give log 2 and no
    gradient.

    :raises ValueError: the temperature is not positive.
    :source: MOON (Li, He, Song, CVPR 2021, arXiv 2103.16257), Eq. 3: the anchor is the local model's z, the positive
        the global model's, the negative that of the client's previous model. FDCL, Algorithm 2, lines 8 and 9.

    >>> z, of_global, of_previous = torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]], [[0.0, 1.0]]])
    >>> model_contrastive_loss(z, of_global, of_previous)
    tensor(0.2633)
    """
    _check_temperature(temperature)
    dtype = anchor.dtype
    # Cosines of nearly equal features differ by less than bfloat16 can tell.
    anchor, positive, negative = (_unit(z.float() if z.itemsize < 4 else z) for z in (anchor, positive, negative))
    near, far = (anchor * positive).sum(-1), (anchor * negative).sum(-1)  # (B,) each
    return F.softplus((far - near) / temperature).mean().to(dtype)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _unit(x: Tensor) -> Tensor:
    return x / _norms(x)


def _norms(x: Tensor) -> Tensor:
    """Return the clamped lengths of the rows, (..., d) -> (..., 1)."""
    # float16 cannot hold 1e-8: there its least normal number is the bound.
    least = max(MIN_NORM, torch.finfo(x.dtype).tiny)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norms.clamp(min=least)
