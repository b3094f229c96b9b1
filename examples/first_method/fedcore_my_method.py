"""MyMethod as a fedcore plugin."""

from __future__ import annotations

from pydantic import Field

from fedcore import Loss, Plugin, PluginOptions, Step, hookimpl
from fedcore_functional import proximal_term

__all__ = ["MyMethod", "MyMethodOptions"]


class MyMethodOptions(PluginOptions):
    """Options of MyMethod."""

    strength: float = Field(default=0.1, ge=0, description="Pull at the start; 0 is FedAvg.")


class MyMethod(Plugin[MyMethodOptions]):
    """MyMethod: clients minimise F_k(w) + a_t / 2 ||w - w_t||^2, with a_t = strength (1 - t / T)."""

    neutral = {"strength": 0.0}
    assumes = ("rounds",)

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Add the term: strong in the first rounds, weak in the last."""
        if self.options.strength == 0:
            return None
        distance = proximal_term(step.parameters, step.reference)
        return Loss(distance, weight=self.options.strength * (1 - step.progress), name="distance")
