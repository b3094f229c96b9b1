"""The published rules, a function each: pure, on stacked values of the clients; sums in float64, rounded once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def coordinate_median(values: Tensor) -> Tensor:
    """Return the median over clients of every coordinate: (n, ...) -> (...), same dtype.

    An even number of clients gives the mean of the middle two; integers and booleans the lower of them, which is some
    client's own value.

    :source: Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv 1803.01498, Definition 1.

    >>> coordinate_median(torch.tensor([[1.0, -9.0], [2.0, 5.0], [900.0, 6.0], [4.0, 7.0]]))
    tensor([3.0000, 5.5000])
    """
    ordered = values.sort(dim=0).values
    low, high = (len(values) - 1) // 2, len(values) // 2
    if low == high or not values.is_floating_point():
        return ordered[low].clone()
    return ((ordered[low].double() + ordered[high].double()) / 2).to(values.dtype)


def trimmed_mean(values: Tensor, trim: int) -> Tensor:
    """Return every coordinate's mean without its ``trim`` least and ``trim`` greatest values: (n, ...) -> (...).

    ``values`` are floating; ``trim`` is the paper's beta * n. 0 is the plain mean.

    :raises ValueError: nothing would be left.
    :source: Yin et al., ICML 2018, arXiv 1803.01498, Definition 2.

    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [900.0], [4.0]]), 1)
    tensor([3.])
    """
    if not 0 <= 2 * trim < len(values):
        raise ValueError(f"{trim} values cannot be cut from both ends of {len(values)}")
    left = values.sort(dim=0).values[trim : len(values) - trim]
    return left.double().mean(dim=0).to(values.dtype)


def squared_distances(tensors: Iterable[Tensor]) -> Tensor:
    """Return the squared Euclidean distance of every two clients' vectors, (n, n) float64.

    :param tensors: the parts of the vectors, each (n, ...): client by client.

    >>> squared_distances([torch.tensor([[0.0], [3.0]]), torch.tensor([[0.0, 0.0], [0.0, 4.0]])])
    tensor([[ 0., 25.],
            [25.,  0.]], dtype=torch.float64)
    """
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        rows = tensor.double().reshape(len(tensor), -1)  # (n, d); d is 1 for a scalar parameter
        # Row by row: a product of matrices would cancel where clients are near each other.
        total = total + torch.stack([(rows - row).square().sum(dim=1) for row in rows])
    return total


def krum_scores(distances: Tensor, byzantine: int) -> Tensor:
    """Return each client's sum of squared distances to its n - f - 2 nearest others, (n,).

    ``distances`` (n, n) as of :func:`squared_distances`, ``byzantine`` f. Where n - f - 2 is less than 1, the nearest
    other one counts.

    :source: Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv 1703.02757, Section 4.

    >>> points = torch.tensor([[0.0], [1.0], [3.0], [90.0], [2.0]])
    >>> krum_scores(squared_distances([points]), 1).tolist()
    [5.0, 2.0, 5.0, 15313.0, 2.0]
    """
    n = len(distances)
    others = distances.clone().fill_diagonal_(torch.inf).sort(dim=1).values[:, : n - 1]
    return others[:, : max(1, n - byzantine - 2)].sum(dim=1)


def lowest(scores: Tensor, count: int) -> list[int]:
    """Return the positions of the ``count`` lowest scores in ascending order; ties go to who comes first.

    One is Krum, more are Multi-Krum, whose result is the mean of the chosen vectors.

    :source: Blanchard et al., NeurIPS 2017, arXiv 1703.02757, Section 4 (Krum) and its Multi-Krum.

    >>> lowest(torch.tensor([3.0, 1.0, 2.0, 1.0]), 2)
    [1, 3]
    """
    return sorted(scores.argsort(stable=True)[:count].tolist())


def clip_factor(norm: float, bound: float) -> float:
    r"""Return :math:`1 / \max(1, \|\Delta\| / M)`, what an update of this norm is multiplied by.

    :source: Sun, Kairouz, Suresh, McMahan, 2019, arXiv 1911.07963, norm thresholding of updates.

    >>> clip_factor(2.0, 4.0), clip_factor(8.0, 4.0), clip_factor(0.0, 4.0)
    (1.0, 0.5, 1.0)
    """
    return 1.0 / max(1.0, norm / bound)
