"""FedSAM's ascent to the worst point near by, and FedASAM's, whose neighbourhood has the scale of the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SMALLEST = 1e-12
"""Added to the norm, so that a gradient of 0 leads nowhere."""


def scales(weights: Mapping[str, Tensor], eta: float) -> dict[str, Tensor]:
    """Return T_w: |w| + eta of weights, 1 of biases and whatever else is not called a weight.

    :source: Kwon et al., ICML 2021, arXiv 2102.11600 (ASAM), and the code of Caldarola et al., ECCV 2022.
    """
    return {name: w.abs() + eta if "weight" in name else torch.ones_like(w) for name, w in weights.items()}


def ascended(
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    rho: float,
    scale: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""Return w + epsilon, epsilon = rho g / |g|; with a scale T epsilon = rho T^2 g / |T g|.

    The norm is that of all tensors as one vector. Waits for no device.

    :source: Qu et al., ICML 2022, arXiv 2206.02618 (local training of FedSAM); Caldarola et al., ECCV 2022.

    >>> ascended({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 4.0])}, 0.5)["w"]
    tensor([1.3000, 1.4000])
    """
    scaled = gradients if scale is None else {name: scale[name] * g for name, g in gradients.items()}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in scaled.values()]))
    length = rho / (norm + SMALLEST)
    directions = scaled if scale is None else {name: scale[name] * g for name, g in scaled.items()}
    return {name: weights[name] + length * g for name, g in directions.items()}
