"""The Per-FedAvg plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, ConfigError, Plugin, PluginOptions, RunSetup, SplitModel, Step, hookimpl
from fedcore_per_fedavg import equations as eq


class PerFedAvgOptions(PluginOptions):
    """Options of Per-FedAvg."""

    alpha: float = Field(
        default=0.005, ge=0, description="alpha: length of the step that adapts the model; 0 is FedAvg."
    )
    variant: Literal["hf", "fo"] = Field(
        default="hf", description="Second derivatives by a difference of gradients (hf), or left out (fo)."
    )
    delta: float = Field(
        default=1e-3, gt=0, le=1, description="delta: half the difference's length, in gradients (hf)."
    )
    batches: Literal["split", "shared"] = Field(
        default="split", description="D, D' and D'' are parts of the mini-batch, or each is the whole."
    )
    steps: int = Field(
        default=1, ge=1, le=1000, description="Steps of length alpha before a client's model is evaluated."
    )


class PerFedAvg(Plugin[PerFedAvgOptions]):
    """Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv 2002.07948), Algorithm 1.

    Clients minimise F_i(w) = f_i(w - alpha grad f_i(w)), their loss after one gradient step, by (I - alpha H_i(w, D''))
    grad f_i(w - alpha grad f_i(w, D), D'). A client's own model is w after such a step on its training part.
    """

    neutral = {"alpha": 0.0}
    assumes = ("cross-entropy",)  # a client's own model is adapted by it

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse the difference of two gradients in an arithmetic that does not resolve it."""
        if self.options.variant == "hf" and self.options.alpha > 0 and setup.config.precision != "float32":
            raise ConfigError(
                f"plugin {self.name!r}: hf takes second derivatives from the difference of two nearby gradients, of "
                f"which {setup.config.precision} leaves rounding noise. Use --precision float32, or "
                f"--set {self.name}.variant=fo"
            )

    @hookimpl
    def gradients(self, step: Step, gradients: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Take the gradient of F_i on the batch."""
        options = self.options
        if options.alpha == 0:
            return None
        rows: list[slice | None] = [None, None, None]
        if options.batches == "split":
            rows = [*eq.parts(len(step.y), 3 if options.variant == "hf" else 2), None]
        weights = {name: step.model.get_parameter(name) for name in gradients}
        inner = gradients if rows[0] is None else step.gradients_at({}, rows[0])
        outer = step.gradients_at(eq.moved(weights, inner, -options.alpha), rows[1])
        if options.variant == "fo":
            return outer
        above, below = (
            step.gradients_at(eq.moved(weights, outer, length), rows[2]) for length in (options.delta, -options.delta)
        )
        return eq.moved(outer, eq.curvature(above, below, options.delta), -options.alpha)

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | None:
        """Adapt the global model by steps of length alpha on the client's training part."""
        if self.options.alpha == 0:
            return None
        own = client.network()
        for _ in range(self.options.steps):
            gradients = client.gradients(model=own)
            with torch.no_grad():
                for name, gradient in gradients.items():
                    own.get_parameter(name).sub_(gradient, alpha=self.options.alpha)
        return own
