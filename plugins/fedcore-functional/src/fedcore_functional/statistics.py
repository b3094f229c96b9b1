"""Class Gaussians of a federation: the mathematics of USCC and CCVR, as pure functions.

They pool the statistics of many clients and sample features from them. Shapes: K clients, C classes, feature width d;
counts (K, C), means (K, C, d), covariances (K, C, d, d) with the denominator n - 1. The rows of a class with count 0
are ignored. All arithmetic is float64; results have the means' dtype. Equation numbers are FedECCR's, which takes the
equations from CCVR.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedcore import Answer, RoundFailedError, ServerContext, Tensors, check_tensors
from fedcore_functional.bounds import UNKNOWN, FeatureRange, check_covariance, check_means
from fedcore_functional.classes import check_counts, class_statistics

Statistics = tuple[Tensor, Tensor, Tensor]
"""Counts, means and covariances."""


def pool_statistics(counts: Tensor, means: Tensor, covariances: Tensor) -> Statistics:
    """Return counts (C,), means (C, d) and covariances (C, d, d) of all clients' features taken together.

    Eq. 7 has a form without cancellation here: its last two sums are the scatter of the clients' means around the
    pooled mean. The covariance is 0 where n_c is 0 or 1; the mean is 0 where n_c is 0.

    :source: CCVR (Luo et al., NeurIPS 2021, arXiv 2106.05001); FedECCR (Zeng et al. 2023), Eqs. 6 and 7.

    >>> counts, means = torch.tensor([[2], [1]]), torch.tensor([[[1.0]], [[4.0]]])  # {0, 2} and {4}
    >>> pool_statistics(counts, means, torch.tensor([[[[2.0]]], [[[0.0]]]]))
    (tensor([3]), tensor([[2.]]), tensor([[[4.]]]))
    """
    total = counts.sum(0)  # (C,)
    n, n_c = counts.double(), total.double()  # (K, C), (C,)
    mu = torch.where((n > 0).unsqueeze(2), means.double(), 0.0)  # (K, C, d)
    sigma = torch.where((n > 1).view(*n.shape, 1, 1), covariances.double(), 0.0)  # (K, C, d, d)
    # Shares, so that a client alone keeps its own bits.
    pooled = ((n / n_c.clamp(min=1)).unsqueeze(2) * mu).sum(0)  # (C, d), Eq. 6
    free = (n_c - 1).clamp(min=1)  # (C,)
    within = torch.einsum("kc,kcij->cij", (n - 1).clamp(min=0) / free, sigma)
    apart = (n / free).sqrt().unsqueeze(2) * (mu - pooled)  # (K, C, d)
    between = torch.einsum("kci,kcj->cij", apart, apart)
    covariance = torch.where((total > 1).view(-1, 1, 1), within + between, 0.0)  # Eq. 7
    return total, pooled.to(means.dtype), covariance.to(means.dtype)


def pool_two(first: Statistics, second: Statistics) -> Statistics:
    """Return the pool of two statistics, each of a client or a pool. Memory does not grow with the clients."""
    counts, means, covariances = (torch.stack(pair) for pair in zip(first, second, strict=True))
    return pool_statistics(counts, means, covariances)


def sample_features(
    means: Tensor, covariances: Tensor, per_class: int, *, generator: torch.Generator, known: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``per_class`` features of each known class from N(mu_c, Sigma_c), class by class, and their labels.

    A feature is mu + V sqrt(L) V^T e with e from N(0, 1). V are Sigma's eigenvectors, L its eigenvalues; rounding may
    put some below 0, and these are set to 0. A rank-deficient Sigma gives features in its span, a zero Sigma copies of
    the mean. The symmetric root does not depend on the eigenvectors' signs. A class's draws do not depend on the other
    known classes.

    :param means: (C, d); ``covariances`` (C, d, d), symmetric.
    :param known: (C,) bool. None: all are known.
    :returns: features (n, d) in the means' dtype and labels (n,) int64, n = per_class * known classes.
    :source: CCVR, Algorithm 1; FedECCR, Algorithm 2 lines 7 to 9.
    """
    classes, width = means.shape
    chosen = [True] * classes if known is None else known.tolist()
    parts = [means.new_zeros(0, width, dtype=torch.float64)]
    for mu, sigma, wanted in zip(means.double(), covariances.double(), chosen, strict=True):
        noise = torch.randn(per_class, width, generator=generator, dtype=torch.float64)  # (M, d)
        if wanted:
            values, vectors = _eigh(sigma)  # (d,), (d, d)
            root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT  # (d, d)
            parts.append(mu + noise.to(root.device) @ root)
    labels = torch.tensor([c for c in range(classes) if chosen[c]], dtype=torch.int64, device=means.device)
    return torch.cat(parts).to(means.dtype), labels.repeat_interleave(per_class)


def _eigh(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (d,) and eigenvectors (d, d) of a symmetric matrix."""
    try:
        values, vectors = torch.linalg.eigh(sigma)
    except RuntimeError:  # LinAlgError: torch's LAPACK may not converge where features are constant; NumPy's did
        values, vectors = (torch.from_numpy(part).to(sigma.device) for part in np.linalg.eigh(sigma.cpu().numpy()))
    return values, vectors


def pack_statistics(counts: Tensor, means: Tensor, covariances: Tensor) -> Tensors:
    """Return a client's message: the statistics of the classes that it holds, half of each symmetric covariance."""
    classes = counts.nonzero().squeeze(1)  # (H,)
    rows, columns = torch.triu_indices(means.shape[1], means.shape[1], device=means.device)
    return {
        "classes": classes,
        "counts": counts[classes],
        "means": means[classes],  # (H, d)
        "covariances": covariances[classes][:, rows, columns],  # (H, d (d + 1) / 2)
    }


def check_statistics(
    sent: Mapping[str, Tensor], num_classes: int, width: int, *, samples: int, within: FeatureRange = UNKNOWN
) -> None:
    """Refuse wrong shapes, dtypes, classes and counts in one client's message, and what no features can have.

    :param samples: the client's training samples, which its counts cannot exceed.
    :param within: the range of the features.
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
    check_counts(sent["counts"], samples, least=1)
    check_means("means", sent["means"], within)
    for n, mean, upper in zip(sent["counts"].tolist(), sent["means"], sent["covariances"], strict=True):
        check_covariance(n, mean, _square(upper.unsqueeze(0), width)[0], within)


def unpack_statistics(sent: Mapping[str, Tensor], num_classes: int) -> Statistics:
    """Return counts (C,), means (C, d) and covariances (C, d, d) from a message of :func:`pack_statistics`."""
    classes, width = sent["classes"], sent["means"].shape[1]
    counts = sent["counts"].new_zeros(num_classes)
    means = sent["means"].new_zeros(num_classes, width)
    covariances = means.new_zeros(num_classes, width, width)
    counts[classes], means[classes] = sent["counts"], sent["means"]
    covariances[classes] = _square(sent["covariances"], width).to(means.dtype)
    return counts, means, covariances


def _square(upper: Tensor, width: int) -> Tensor:
    """Return symmetric matrices (H, d, d) from their upper halves (H, d (d + 1) / 2)."""
    rows, columns = torch.triu_indices(width, width, device=upper.device)
    square = upper.new_zeros(len(upper), width, width)
    square[:, rows, columns] = square[:, columns, rows] = upper
    return square


def feature_statistics(features: Tensor, labels: Tensor, num_classes: int) -> Tensors:
    """Return one client's message for its features (n, d) and labels (n,): the packed statistics of each class.

    :source: CCVR; FedECCR, Eqs. 4 and 5.
    """
    return pack_statistics(*class_statistics(features, labels, num_classes))


def pool_answers(server: ServerContext, answers: Iterable[Answer], *, asker: str) -> Statistics:
    """Return the pooled statistics of all clients that answered with their :func:`feature_statistics`.

    Answers are read one by one, so memory does not grow with the clients. A note names the classes without a holder.

    :param asker: the plugin's name, for the error.
    :raises RoundFailedError: no client answered.
    """
    received = (unpack_statistics(answer.tensors, server.num_classes) for answer in answers)
    first = next(received, None)
    if first is None:
        raise RoundFailedError(
            f"plugin {asker!r}: no client answered with the statistics of its features, so the classifier cannot "
            "be corrected. The trained model is kept; fedcore resume asks again."
        )
    pooled = reduce(pool_two, received, first)
    absent = ", ".join(str(c) for c, count in enumerate(pooled[0].tolist()) if count == 0)
    if absent:
        server.note(f"no client that answered holds class {absent}; the classifier is corrected without it")
    return pooled
