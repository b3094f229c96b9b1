"""Equal client sizes, and class shares drawn per client from Dirichlet(alpha * p)."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import numpy_generator
from fedcore.data import (
    IntArray,
    PartitionWarning,
    assign_by_counts,
    check_alpha,
    checked_labels,
    even_sizes,
    parts_by_owner,
)

FloatArray: TypeAlias = npt.NDArray[np.float64]

TOLERANCE = 1e-6
"""Squared distance between the clients' mean shares and the data's below which no client is redrawn."""
MAX_REDRAWS = 2000
_CANDIDATES = 32
# The most (candidate, class) cells that are redrawn: about a second of work for any number of classes.
_REDRAW_BUDGET = 5_000_000
_WORTH_A_NOTE = 0.01


def dirichlet_clients(labels: IntArray, num_clients: int, *, alpha: float, seed: int, **_: Any) -> list[IntArray]:
    """Draw each client's class shares from Dirichlet(alpha * p), p the data's; all clients have the same size.

    ``labels`` (n,) integers; returns ``num_clients`` index arrays that hold every sample once and differ by at most
    one in size. The clients' mean shares must be near p, or the draws exceed some classes. As in FLGo, the clients are
    redrawn in turn while that moves the mean towards p (at most ``MAX_REDRAWS`` redraws, each the best of several
    candidates). A client whose class is exhausted takes samples of the other classes in proportion to its shares; if
    these are more than 1 % of all samples, a :class:`PartitionWarning` states their number.

    The concentration of class c is alpha * p_c, so the same alpha is more heterogeneous here than in ``dirichlet``,
    which splits each class by Dirichlet(alpha, ..., alpha) over the clients.

    :raises ConfigError: no clients, more clients than samples, alpha not positive.
    :source: Hsu, Qi, Brown (2019, arXiv 1909.06335), section 2; FLGo (Wang et al., 2023, arXiv 2306.12079).
    """
    labels = checked_labels(labels, num_clients)
    check_alpha(alpha)
    rng = numpy_generator(seed, "partition")
    class_of, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    logs = balanced_log_shares(class_sizes / len(labels), num_clients, alpha, rng)
    counts, otherwise = split_by_shares(logs, even_sizes(len(labels), num_clients), class_sizes, rng)
    if num_clients > 1 and otherwise > _WORTH_A_NOTE * len(labels):
        warnings.warn(
            f"dirichlet-clients with alpha {alpha:g}: the class shares drawn for {num_clients} clients exceed "
            f"some classes; {otherwise} of {len(labels)} samples are of other classes than drawn",
            PartitionWarning,
            stacklevel=2,
        )
    return parts_by_owner(assign_by_counts(counts.T, class_of.astype(np.int64), rng), num_clients, rng)


def log_shares(shapes: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """Return logarithms of ``count`` draws from Dirichlet(shapes), up to a constant per row: (count, C), all finite.

    A gamma variate of shape a is one of shape a + 1 times U^(1/a), so the logarithms do not underflow for small a.
    """
    uniform = 1 - rng.random((count, len(shapes)))  # in (0, 1]
    logs: FloatArray = np.log(rng.standard_gamma(shapes + 1, size=uniform.shape)) + np.log(uniform) / shapes
    return logs


def balanced_log_shares(p: FloatArray, num_clients: int, alpha: float, rng: np.random.Generator) -> FloatArray:
    """Return log shares of all clients, (N, C), redrawn until their mean is near p (C,) or the budget is spent."""
    shapes = alpha * p
    logs = log_shares(shapes, num_clients, rng)
    total = normalised(logs).sum(axis=0)  # (C,)
    distance = _distance(total, p, num_clients)
    for redraw in range(min(MAX_REDRAWS, 1 + _REDRAW_BUDGET // (_CANDIDATES * len(p)))):
        if distance <= TOLERANCE:
            break
        client = redraw % num_clients
        candidates = log_shares(shapes, _CANDIDATES, rng)
        totals = total - normalised(logs[client : client + 1]) + normalised(candidates)  # (candidates, C)
        distances = _distance(totals, p, num_clients)
        best = int(np.argmin(distances))
        if distances[best] < distance:
            logs[client], total, distance = candidates[best], totals[best], distances[best]
    return logs


def split_by_shares(
    logs: FloatArray, sizes: IntArray, class_sizes: IntArray, rng: np.random.Generator
) -> tuple[IntArray, int]:
    """Return samples per client and class, (N, C), with exactly these sums, and how many deviate from the shares.

    Each client requests samples by its shares, with unbiased random rounding. Requests that exceed a class are reduced
    in proportion; clients with too few samples request the rest from the remaining classes, by their shares of these.

    :param logs: log shares, (N, C), all finite.
    :param sizes: samples of each client, (N,); their sum is that of ``class_sizes``, (C,).
    """
    counts = np.zeros(logs.shape, dtype=np.int64)
    need, left = sizes.copy(), class_sizes.copy()
    otherwise = -1
    while need.any():  # each pass assigns everything or exhausts at least one class
        asking = np.flatnonzero(need)
        shares = normalised(np.where(left > 0, logs[asking], -np.inf))
        asked = _rounded(shares, need[asking], rng)
        wanted = asked.sum(axis=0)
        for k in np.flatnonzero(wanted > left):
            asked[:, k] = np.diff(np.cumsum(asked[:, k]) * left[k] // wanted[k], prepend=0)
        counts[asking] += asked
        need[asking] -= asked.sum(axis=1)
        left -= asked.sum(axis=0)
        if otherwise < 0:
            otherwise = int(need.sum())
    return counts, max(otherwise, 0)


def normalised(logs: FloatArray) -> FloatArray:
    """Return shares, rows that add up to 1, of log shares (..., C); -inf is a share of 0, never of a whole row."""
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))


def _distance(totals: FloatArray, p: FloatArray, num_clients: int) -> FloatArray:
    """Return the squared distances from p of means given as sums over the clients, (..., C) -> (...)."""
    return np.asarray(np.square(totals / num_clients - p).sum(axis=-1))


def _rounded(shares: FloatArray, sizes: IntArray, rng: np.random.Generator) -> IntArray:
    """Return integers (N, C) with row sums ``sizes``: each within 1 of its share, and unbiased."""
    ends = np.cumsum(shares, axis=1)
    ends *= sizes[:, None] / ends[:, -1:]
    ends[:, -1] = sizes
    offsets = rng.random((len(sizes), 1))
    cuts = np.minimum(np.floor(ends + offsets), sizes[:, None]).astype(np.int64)
    return np.diff(cuts, prepend=0)
