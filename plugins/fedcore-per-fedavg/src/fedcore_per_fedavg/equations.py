"""The gradient of F(w) = f(w - alpha grad f(w)), which is (I - alpha H(w)) grad f(w - alpha grad f(w))."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def moved(weights: Mapping[str, Tensor], direction: Mapping[str, Tensor], length: float) -> dict[str, Tensor]:
    """Return w + length * direction by name; the client's step has length -alpha.

    :source: Algorithm 1: w~ = w - alpha grad f(w, D).

    >>> import torch
    >>> moved({"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}, -0.25)["w"]
    tensor([0.])
    """
    return {name: weights[name] + length * d for name, d in direction.items()}


def curvature(above: Mapping[str, Tensor], below: Mapping[str, Tensor], delta: float) -> dict[str, Tensor]:
    """Return H(w) v as [grad f(w + delta v) - grad f(w - delta v)] / (2 delta).

    :param above: grad f(w + delta v); ``below`` grad f(w - delta v).
    :source: the HF variant's approximation of the Hessian's product.
    """
    return {name: (g - below[name]) / (2 * delta) for name, g in above.items()}


def parts(rows: int, count: int, smallest: int = 2) -> list[slice]:
    """Return so many disjoint parts of a batch, the last of which has the remaining samples.

    A batch of fewer than ``smallest`` rows in each is not split: every part is the whole.

    >>> parts(7, 2), parts(3, 2)
    ([slice(0, 3, None), slice(3, 7, None)], [slice(0, 3, None), slice(0, 3, None)])
    """
    size = rows // count
    if size < smallest:
        return [slice(0, rows)] * count
    return [slice(i * size, (i + 1) * size if i < count - 1 else rows) for i in range(count)]
