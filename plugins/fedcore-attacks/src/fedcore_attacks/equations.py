"""The attacks' mathematics, a function each: pure, on samples, on the updates y_k - w_t as rows (n, d), on payloads.

A payload is what a method sends next to the model, tensors by name, or an answer to a question. The attacks on it know
names and shapes and no method: rows of a tensor (C, ...) belong to classes, ``classes`` lists labels, ``counts`` counts
samples, a name with "covariance" is a second moment, and booleans say which classes a client holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fedcore import Tensors


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


def triggered(inputs: Any, size: int, value: float) -> Tensor:
    """Return inputs with a square of ``value`` in the lower right corner; of rows (B, d) the last ``size`` numbers.

    :raises ValueError: the inputs are no tensor of floating-point numbers.
    :source: Gu, Dolan-Gavitt, Garg, 2017, arXiv 1708.06733, Section 4.1 (pattern backdoor).

    >>> triggered(torch.zeros(1, 1, 3, 3), 2, 1.0).tolist()
    [[[[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]]]
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ValueError("a backdoor's trigger needs inputs that are tensors of numbers, such as images")
    marked = inputs.clone()
    if inputs.ndim > 2:
        marked[..., -size:, -size:] = value
    else:
        marked[..., -size:] = value
    return marked


def scaled_payload(sent: Mapping[str, Tensor], factor: float) -> Tensors:
    """Return the payload of features that are ``factor`` times as long. Covariances take its square.

    >>> scaled_payload({"means": torch.ones(1), "covariances": torch.ones(1), "counts": torch.ones(1).long()}, -3.0)
    {'means': tensor([-3.]), 'covariances': tensor([9.]), 'counts': tensor([1])}
    """
    return {
        name: tensor * (factor**2 if "covariance" in name else factor) if tensor.is_floating_point() else tensor
        for name, tensor in sent.items()
    }


def swapped_payload(
    sent: Mapping[str, Tensor], num_classes: int, source: int | None = None, target: int | None = None
) -> Tensors:
    """Return the payload under other labels: y -> C - 1 - y, or ``source`` and ``target`` change places.

    >>> swapped_payload({"prototypes": torch.tensor([[1.0], [2.0], [3.0]]), "loss": torch.ones(1)}, 3, 0, 1)
    {'prototypes': tensor([[2.],
            [1.],
            [3.]]), 'loss': tensor([1.])}
    """
    labels = torch.arange(num_classes).flip(0)
    if source is not None and target is not None:
        labels = torch.arange(num_classes)
        labels[[source, target]] = torch.tensor([target, source])
    if "classes" in sent:
        return {**sent, "classes": labels.to(sent["classes"].device)[sent["classes"]]}
    return {name: t[labels.to(t.device)] if t.shape[:1] == (num_classes,) else t for name, t in sent.items()}


def inflated_payload(sent: Mapping[str, Tensor], factor: float) -> Tensors:
    """Return the payload with ``factor`` times the ``counts``, rounded, and with every class held.

    >>> inflated_payload({"counts": torch.tensor([0, 2]), "held": torch.tensor([False, True])}, 10.0)
    {'counts': tensor([ 0, 20]), 'held': tensor([True, True])}
    """
    inflated = {name: torch.ones_like(t) if t.dtype == torch.bool else t for name, t in sent.items()}
    if "counts" in inflated:
        counts = inflated["counts"]
        inflated["counts"] = (counts.double() * factor).round().to(counts.dtype)
    return inflated


def alie_z(clients: int, malicious: int) -> float:
    """Return ALIE's z: the largest number of deviations at which enough honest updates lie further out to be outvoted.

    s = floor(n / 2 + 1) - m honest clients are needed for a majority, and z = Phi^-1((n - m - s) / (n - m)). Where none
    is needed the quantile is bounded.

    :source: Baruch, Baruch, Goldberg, NeurIPS 2019, arXiv 1902.06156, Algorithm 3.

    >>> round(alie_z(50, 24), 2)
    1.43
    """
    honest, needed = clients - malicious, clients // 2 + 1 - malicious
    share = min(max((honest - needed) / honest, 1e-3), 1 - 1e-3) if honest else 1 - 1e-3
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
    entry of an eigenvector is this part up to a factor. Of equals, as two clients always are, it is the first.

    :source: Karimireddy, He, Jaggi, ICLR 2022, arXiv 2006.09365, Appendix B (mimic; z there by Oja's rule over rounds).

    >>> most_spread(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [30.0, 0.0]]))
    3
    """
    rows = honest.double()
    centred = rows - rows.mean(dim=0)
    part = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1].abs()
    return int((part >= part.max() * (1 - 1e-9)).nonzero()[0])  # equals differ by rounding
