"""The attacks' mathematics, a function each: pure, on samples, or on the updates y_k - w_t as rows (n, d)."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor


def flipped_labels(labels: Tensor, num_classes: int, source: int | None = None, target: int | None = None) -> Tensor:
    """Return labels y -> C - 1 - y, or ``source`` -> ``target`` with the other labels as they are.

    :source: Tolpegin, Truex, Gursoy, Liu, ESORICS 2020, arXiv 2007.08432, Section 3.2 (one class); Fang, Cao, Jia,
        Gong, USENIX Security 2020, arXiv 1911.11815, Section 4.1 (all classes).

    >>> flipped_labels(torch.tensor([0, 1, 9]), 10)
    tensor([9, 8, 0])
    >>> flipped_labels(torch.tensor([0, 1, 9]), 10, source=1, target=7)
    tensor([0, 7, 9])
    """
    if source is None or target is None:
        return num_classes - 1 - labels
    return torch.where(labels == source, target, labels)


def triggered(inputs: Tensor, size: int, value: float) -> Tensor:
    """Return inputs with a square of ``value`` in the lower right corner; of rows (B, d) the last ``size`` numbers.

    :source: Gu, Dolan-Gavitt, Garg, 2017, arXiv 1708.06733, Section 4.1 (pattern backdoor).

    >>> triggered(torch.zeros(1, 1, 3, 3), 2, 1.0).tolist()
    [[[[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]]]
    """
    marked = inputs.clone()
    if inputs.ndim > 2:
        marked[..., -size:, -size:] = value
    else:
        marked[..., -size:] = value
    return marked


def alie_z(clients: int, malicious: int) -> float:
    """Return ALIE's z: the largest number of deviations at which enough honest updates lie further out to be outvoted.

    s = floor(n / 2 + 1) - m honest clients are needed for a majority, and z = Phi^-1((n - m - s) / (n - m)).

    :source: Baruch, Baruch, Goldberg, NeurIPS 2019, arXiv 1902.06156, Algorithm 3.

    >>> round(alie_z(50, 24), 2)
    1.43
    """
    honest, needed = clients - malicious, clients // 2 + 1 - malicious
    share = min(max((honest - needed) / honest, 1e-3), 1 - 1e-3)
    return NormalDist().inv_cdf(share)


def alie(honest: Tensor, z: float) -> Tensor:
    """Return the mean of the honest updates minus z of their standard deviations, (d,).

    :source: Baruch et al., NeurIPS 2019, arXiv 1902.06156, Algorithm 3 (with n - 1 in the variance).

    >>> alie(torch.tensor([[1.0], [3.0]]), 1.0)
    tensor([0.5858])
    """
    deviation = honest.std(dim=0) if len(honest) > 1 else torch.zeros_like(honest[0])
    return honest.mean(dim=0) - z * deviation


def inner_product_manipulation(honest: Tensor, epsilon: float) -> Tensor:
    """Return -epsilon times the mean of the honest updates, (d,).

    :source: Xie, Koyejo, Gupta, UAI 2019, arXiv 1903.03936, Section 4.

    >>> inner_product_manipulation(torch.tensor([[1.0], [3.0]]), 0.5)
    tensor([-1.])
    """
    return -epsilon * honest.mean(dim=0)


def most_spread(honest: Tensor) -> int:
    """Return the position of the honest client to mimic: the largest part along the direction of most variance.

    i* = argmax |z . (x_i - mean)|, with z the first principal direction. From the Gram matrix (n, n), where the i-th
    entry of an eigenvector is this part up to a factor.

    :source: Karimireddy, He, Jaggi, ICLR 2022, arXiv 2006.09365, Appendix B (mimic; z there by Oja's rule over rounds).

    >>> most_spread(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [30.0, 0.0]]))
    3
    """
    centred = (honest - honest.mean(dim=0)).double()
    vectors = torch.linalg.eigh(centred @ centred.T).eigenvectors
    return int(vectors[:, -1].abs().argmax())
