"""Rules for clients that differ, a function each: pure, on the clients' stacked vectors (n, d), in their dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore_robust.equations import coordinate_median, krum_scores


def bucket_weights(order: Tensor, size: int) -> Tensor:
    """Return the matrix whose product with the clients' vectors is the buckets' means, (ceil(n / s), n) float64.

    :param order: a random permutation of the n clients; each ``size`` s of them in turn are a bucket.
    :param size: s. The last bucket may be smaller.
    :source: Karimireddy, He, Jaggi, ICLR 2022, arXiv 2006.09365, Algorithm 1 (s-bucketing).

    >>> bucket_weights(torch.tensor([2, 0, 1]), 2)
    tensor([[0.5000, 0.0000, 0.5000],
            [0.0000, 1.0000, 0.0000]], dtype=torch.float64)
    """
    buckets = order.split(size)
    weights = torch.zeros(len(buckets), len(order), dtype=torch.float64)
    for row, bucket in zip(weights, buckets, strict=True):
        row[bucket] = 1 / len(bucket)
    return weights


def neighbour_weights(distances: Tensor, byzantine: int) -> Tensor:
    """Return the matrix whose product with the vectors is the mean of each one's n - f nearest, (n, n) float64.

    A vector is its own nearest; ties go to who comes first.

    :param distances: (n, n) as of :func:`fedcore_robust.squared_distances`; ``byzantine`` f.
    :source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, AISTATS 2023, arXiv 2302.01772, Algorithm 2 (NNM).

    >>> neighbour_weights(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    count = len(distances) - byzantine
    nearest = distances.clone().fill_diagonal_(-1).argsort(dim=1, stable=True)[:, :count]
    weights = torch.zeros(distances.shape, dtype=torch.float64)
    return weights.scatter_(1, nearest, 1 / count)


def centred_clipping(vectors: Tensor, centre: Tensor, radius: float, iterations: int) -> Tensor:
    r"""Return v after some steps v <- v + mean of (x_i - v) min(1, tau / ||x_i - v||) from the ``centre``, (d,).

    :param radius: tau.
    :source: Karimireddy, He, Jaggi, ICML 2021, arXiv 2012.10333, Equation (CCLIP).

    >>> centred_clipping(torch.tensor([[1.0], [2.0], [900.0]]), torch.zeros(1), 3.0, 1)
    tensor([2.])
    """
    centre = centre.double()
    for _ in range(iterations):
        apart = vectors.double() - centre
        centre = centre + (apart * (radius / apart.norm(dim=1, keepdim=True)).clamp(max=1)).mean(dim=0)
    return centre.to(vectors.dtype)


def geometric_median(vectors: Tensor, smoothing: float, iterations: int) -> Tensor:
    r"""Return the point of least summed distance to the vectors, by the smoothed Weiszfeld algorithm, (d,).

    Each step takes the mean with the weights 1 / max(nu, ||z - x_i||). The start z is the coordinate-wise median, since
    one vector moves the mean without bound.

    :param smoothing: nu.
    :param iterations: most steps; a step of at most 1e-6 times the least max(nu, ||z - x_i||) is the last one.
    :source: Pillutla, Kakade, Harchaoui, IEEE TSP 2022, arXiv 1912.13445, Algorithm 2, every client counted once.

    >>> geometric_median(torch.tensor([[0.0], [1.0], [900.0]]), 1e-6, 50)
    tensor([1.])
    """
    values = vectors.double()
    point = coordinate_median(values)
    for _ in range(iterations):
        distances = (values - point).norm(dim=1).clamp(min=smoothing)
        last, point = point, (distances.reciprocal() / distances.reciprocal().sum()) @ values
        if (point - last).norm() <= 1e-6 * distances.min():
            break
    return point.to(vectors.dtype)


def bulyan_selection(distances: Tensor, byzantine: int) -> list[int]:
    """Return the positions of the n - 2f vectors that Krum chooses in turn, each among those that are left, ascending.

    :param distances: (n, n) as of :func:`fedcore_robust.squared_distances`; ``byzantine`` f.
    :source: El Mhamdi, Guerraoui, Rouault, ICML 2018, arXiv 1802.07927, Section 4, step 1.

    >>> points = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 900.0])
    >>> bulyan_selection((points[:, None] - points).square(), 1)
    [0, 1, 2, 3, 4]
    """
    left = list(range(len(distances)))
    chosen = []
    for _ in range(len(distances) - 2 * byzantine):
        best = int(krum_scores(distances[left][:, left], byzantine).argmin()) if len(left) > 1 else 0
        chosen.append(left.pop(best))
    return sorted(chosen)


def mean_around_median(values: Tensor, count: int) -> Tensor:
    """Return the mean of the ``count`` values nearest to the median, of every coordinate: (n, ...) -> (...).

    :source: El Mhamdi et al., ICML 2018, arXiv 1802.07927, Section 4, step 2 (beta values of every coordinate).

    >>> mean_around_median(torch.tensor([[0.0], [1.0], [3.0], [900.0], [2.0]]), 3)
    tensor([2.])
    """
    apart = (values.double() - coordinate_median(values).double()).abs()
    nearest = apart.argsort(dim=0, stable=True)[:count]
    return values.gather(0, nearest).double().mean(dim=0).to(values.dtype)


def trusted_mean(updates: Tensor, trusted: Tensor) -> Tensor:
    r"""Return the mean of the updates at the server update's length, weighted by max(0, cosine to it), (d,).

    Zeros if no update points into its half-space.

    :param updates: y_k - w_t, (n, d); ``trusted`` g_0, (d,): the server's own update, from samples that it trusts.
    :source: Cao, Fang, Liu, Gong, NDSS 2021, arXiv 2012.13995, Equations (2) to (4).

    >>> trusted_mean(torch.tensor([[4.0, 0.0], [0.0, 9.0], [-9.0, 0.0]]), torch.tensor([1.0, 0.0]))
    tensor([1., 0.])
    """
    rows, own = updates.double(), trusted.double()
    lengths, length = rows.norm(dim=1), own.norm()
    scores = (rows @ own / (lengths * length).clamp(min=1e-300)).clamp(min=0)  # trust scores, (n,)
    total = scores.sum()
    if total == 0:
        return torch.zeros_like(trusted)
    weights: Tensor = scores / total * length / lengths.clamp(min=1e-300)
    return (weights @ rows).to(updates.dtype)
