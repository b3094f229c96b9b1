"""FedProx as a fedcore plugin."""

from __future__ import annotations

from functools import partial

from pydantic import Field

from fedcore import Loss, Plugin, PluginOptions, Step, hookimpl
from fedcore_functional import proximal_term

__all__ = ["FedProx", "FedProxOptions"]


class FedProxOptions(PluginOptions):
    """Options of FedProx."""

    mu: float = Field(default=0.01, ge=0, description="Strength mu of the proximal term (Eq. 2); 0 is FedAvg.")


class FedProx(Plugin[FedProxOptions]):
    """FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, arXiv 1812.06127).

    Each client minimises F_k(w) + mu/2 ||w - w_t||^2 (Eq. 2) over the trainable shared parameters.
    """

    neutral = {"mu": 0.0}

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add the proximal term."""
        pull = partial(proximal_term, step.parameters, step.reference)
        return Loss(pull, weight=self.options.mu, name="proximal")
