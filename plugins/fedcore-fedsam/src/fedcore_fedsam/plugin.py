"""The FedSAM plugin."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor

from fedcore import Plugin, PluginOptions, Step, hookimpl
from fedcore_fedsam.equations import ascended, scales


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
