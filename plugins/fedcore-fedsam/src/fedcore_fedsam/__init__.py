"""FedSAM as a fedcore plugin: sharpness-aware minimisation on the clients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedcore import Plugin, PluginOptions, Step, hookimpl

__all__ = ["FedSAM", "FedSAMOptions", "ascended", "scales"]


class FedSAMOptions(PluginOptions):
    """Options of FedSAM."""

    rho: float = Field(default=0.05, ge=0, description="rho: how far the worst point is looked for; 0 is FedAvg.")
    adaptive: bool = Field(default=False, description="FedASAM: the neighbourhood has the scale of the weights.")
    eta: float = Field(default=0.2, ge=0, description="eta of FedASAM: added to the scale |w| of each weight.")


class FedSAM(Plugin[FedSAMOptions]):
    """FedSAM (Qu et al., ICML 2022, arXiv 2206.02618; Caldarola et al., ECCV 2022, arXiv 2203.11834).

    Every local step follows the gradient at w + rho g / |g|, where the loss near w is largest to first order: clients
    look for flat minima. The server averages as FedAvg does.
    """

    neutral = {"rho": 0.0}

    @hookimpl
    def gradients(self, step: Step, gradients: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Take the batch's gradient at w + epsilon."""
        options = self.options
        if options.rho == 0:
            return None
        weights = {name: step.model.get_parameter(name) for name in gradients}
        scale = scales(weights, options.eta) if options.adaptive else None
        return step.gradients_at(ascended(weights, gradients, options.rho, scale))


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
    # In float32 at least: float16 has no SMALLEST, and no large 1 / |g|.
    wide = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
    scaled = wide if scale is None else {name: scale[name] * g for name, g in wide.items()}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in scaled.values()]))
    length = rho / (norm + SMALLEST)
    directions = scaled if scale is None else {name: scale[name] * g for name, g in scaled.items()}
    return {name: weights[name] + (length * g).to(weights[name].dtype) for name, g in directions.items()}
