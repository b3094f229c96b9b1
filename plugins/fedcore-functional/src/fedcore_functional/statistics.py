"""Class Gaussians of a federation, shared by USCC and CCVR: pure functions.

They pool the statistics of many clients and sample features from them. Shapes: K clients, C classes, features of width
d; counts (K, C), means (K, C, d), covariances (K, C, d, d) with the denominator n - 1. The rows of a
class with count 0 are ignored. All arithmetic is float64; results have the means' dtype. Equation numbers are
FedECCR's, which takes the equations from CCVR.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from fedcore import Answer, RoundFailedError, Tensors, check_tensors
from fedcore_functional.classes import class_statistics

__all__ = [
    "Statistics",
    "check_statistics",
    "feature_statistics",
    "pack_statistics",
    "pool_answers",
    "pool_statistics",
    "pool_two",
    "sample_features",
    "unpack_statistics",
]

Statistics = tuple[Tensor, Tensor, Tensor]
"""Counts, means and covariances."""


def pool_statistics(counts: Tensor, means: Tensor, covariances: Tensor) -> Statistics:
    """Return counts (C,), means (C, d) and covariances (C, d, d) of all clients' features taken together.

    Eq. 7 in a form without cancellation: its last two sums are the scatter of the clients' means around the pooled
    mean. With n_c of 0 or 1 the covariance is zero, with 0 the mean as well.

    :source: CCVR (Luo et al., NeurIPS 2021, arXiv 2106.05001); FedECCR (Zeng et al. 2023), Eqs. 6 and 7.

    >>> counts, means = torch.tensor([[2], [1]]), torch.tensor([[[1.0]], [[4.0]]])  # {0, 2} and {4}
    >>> pool_statistics(counts, means, torch.tensor([[[[2.0]]], [[[0.0]]]]))
    (tensor([3]), tensor([[2.]]), tensor([[[4.]]]))
    """
    total = counts.sum(0)  # (C,)
    n, n_c = counts.double(), total.double()  # (K, C), (C,)
    mu = torch.where((n > 0).unsqueeze(2), means.double(), 0.0)  # (K, C, d)
    sigma = torch.where((n > 1).view(*n.shape, 1, 1), covariances.double(), 0.0)  # (K, C, d, d)
    pooled = ((n / n_c.clamp(min=1)).unsqueeze(2) * mu).sum(0)  # (C, d), Eq. 6; shares, so that one is itself
    free = (n_c - 1).clamp(min=1)  # (C,)
    within = torch.einsum("kc,kcij->cij", (n - 1).clamp(min=0) / free, sigma)
    apart = (n / free).sqrt().unsqueeze(2) * (mu - pooled)  # (K, C, d)
    between = torch.einsum("kci,kcj->cij", apart, apart)
    covariance = torch.where((total > 1).view(-1, 1, 1), within + between, 0.0)  # Eq. 7
    return total, pooled.to(means.dtype), covariance.to(means.dtype)


def pool_two(first: Statistics, second: Statistics) -> Statistics:
    """Return two statistics (each of a client or a pool) pooled, so that memory does not grow with the clients."""
    counts, means, covariances = (torch.stack(pair) for pair in zip(first, second, strict=True))
    return pool_statistics(counts, means, covariances)


def sample_features(
    means: Tensor, covariances: Tensor, per_class: int, *, generator: torch.Generator, known: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``per_class`` features of each known class from N(mu_c, Sigma_c), class by class, and their labels.

    Drawn as mu + V sqrt(L) V^T e with e from N(0, 1), through Sigma's eigenvectors V and eigenvalues L, those below 0
    (rounding) set to 0. A rank-deficient Sigma gives features in its span, a zero Sigma copies of the mean. The
    symmetric root does not depend on the eigenvectors' signs. A class's draws do not depend on the other known classes.

    :param means: (C, d); ``covariances`` (C, d, d), symmetric.
    :param known: (C,) bool; default all.
    :returns: features (n, d) in the means' dtype and labels (n,) int64, n = per_class * known classes.
    :source: CCVR, Algorithm 1; FedECCR, Algorithm 2 lines 7 to 9.
    """
    classes, width = means.shape
    chosen = [True] * classes if known is None else known.tolist()
    parts = [means.new_zeros(0, width, dtype=torch.float64)]
    for mu, sigma, wanted in zip(means.double(), covariances.double(), chosen, strict=True):
        noise = torch.randn(per_class, width, generator=generator, dtype=torch.float64)  # (M, d)
        if wanted:
            values, vectors = torch.linalg.eigh(sigma)  # (d,), (d, d)
            root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT  # (d, d)
            parts.append(mu + noise.to(root.device) @ root)
    labels = torch.tensor([c for c in range(classes) if chosen[c]], dtype=torch.int64, device=means.device)
    return torch.cat(parts).to(means.dtype), labels.repeat_interleave(per_class)


def pack_statistics(counts: Tensor, means: Tensor, covariances: Tensor) -> Tensors:
    """Return a client's message: the classes that it holds, with half of each symmetric covariance."""
    classes = counts.nonzero().squeeze(1)  # (H,)
    rows, columns = torch.triu_indices(means.shape[1], means.shape[1], device=means.device)
    return {
        "classes": classes,
        "counts": counts[classes],
        "means": means[classes],  # (H, d)
        "covariances": covariances[classes][:, rows, columns],  # (H, d (d + 1) / 2)
    }


def check_statistics(sent: Mapping[str, Tensor], num_classes: int, width: int, *, samples: int | None = None) -> None:
    """Refuse anything that :func:`pack_statistics` cannot return: wrong shapes, dtypes, classes, counts or covariances.

    :param samples: the client's training samples, which its counts cannot exceed; None if unknown.
    :raises ValueError: names the tensor, the finding and the expectation.
    """
    classes = sent.get("classes", torch.zeros(0))
    held = classes.numel()
    expected = {
        "classes": ((held,), torch.int64),
        "counts": ((held,), torch.int64),
        "means": ((held, width), None),
        "covariances": ((held, width * (width + 1) // 2), None),
    }
    check_tensors(sent, expected)
    named = classes.tolist()
    if len(set(named)) < held or not set(named) <= set(range(num_classes)):
        raise ValueError(f"'classes' is {named[:num_classes]}, expected distinct numbers from 0 to {num_classes - 1}")
    counts: list[int] = sent["counts"].tolist()
    if min(counts, default=1) < 1:
        raise ValueError(f"'counts' holds {min(counts)}, expected at least 1 for each class that is named")
    if samples is not None and sum(counts) > samples:
        raise ValueError(f"'counts' add up to {sum(counts)}, expected at most the client's {samples} training samples")
    rows, columns = torch.triu_indices(width, width, device=classes.device)
    covariances = sent["covariances"].double()  # (H, d (d + 1) / 2)
    variances = covariances[:, rows == columns]  # (H, d)
    if bool((variances < 0).any()):
        raise ValueError(f"'covariances' holds a variance of {variances.min():g}, expected none below 0")
    if held and bool((covariances.abs().amax(1) > 1.001 * variances.amax(1)).any()):  # Cauchy-Schwarz, but for rounding
        raise ValueError("'covariances' holds a covariance above all variances of its class, which no features have")


def unpack_statistics(sent: Mapping[str, Tensor], num_classes: int) -> Statistics:
    """Return counts (C,), means (C, d) and covariances (C, d, d) from the result of :func:`pack_statistics`."""
    classes, width = sent["classes"], sent["means"].shape[1]
    counts = sent["counts"].new_zeros(num_classes)
    means = sent["means"].new_zeros(num_classes, width)
    covariances = means.new_zeros(num_classes, width, width)
    rows, columns = torch.triu_indices(width, width, device=means.device)
    upper = means.new_zeros(len(classes), width, width)
    upper[:, rows, columns] = upper[:, columns, rows] = sent["covariances"]
    counts[classes], means[classes], covariances[classes] = sent["counts"], sent["means"], upper
    return counts, means, covariances


def feature_statistics(features: Tensor, labels: Tensor, num_classes: int) -> Tensors:
    """Return one client's message for its features (n, d) and labels (n,): the packed statistics of each class.

    :source: CCVR; FedECCR, Eqs. 4 and 5.
    """
    return pack_statistics(*class_statistics(features, labels, num_classes))


def pool_answers(answers: Iterable[Answer], num_classes: int, *, asker: str) -> Statistics:
    """Return the pooled statistics of all clients that answered with their :func:`feature_statistics`.

    Answers are read one by one, so memory does not grow with the clients. Warns about classes without a holder.

    :param asker: the plugin's name, for the messages.
    :raises RoundFailedError: no client answered.
    """
    received = (unpack_statistics(answer.tensors, num_classes) for answer in answers)
    first = next(received, None)
    if first is None:
        raise RoundFailedError(
            f"plugin {asker!r}: no client answered with its features' statistics, so the classifier cannot "
            "be corrected. The trained model is kept; fedcore resume asks again."
        )
    pooled = reduce(pool_two, received, first)
    absent = ", ".join(str(c) for c, count in enumerate(pooled[0].tolist()) if count == 0)
    if absent:
        warnings.warn(
            f"{asker}: no client that answered holds class {absent}; the classifier is corrected without it",
            stacklevel=2,
        )
    return pooled
