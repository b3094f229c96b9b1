"""MOON as a fedcore plugin."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedcore import Loss, ModelTask, Plugin, PluginOptions, RunSetup, SplitModel, Step, hookimpl
from fedcore_functional import model_contrastive_loss

__all__ = ["Moon", "MoonOptions"]


class MoonOptions(PluginOptions):
    """Options of MOON."""

    mu: float = Field(default=1.0, ge=0, description="Weight mu of the contrastive term (Eq. 4); 0 is FedAvg.")
    temperature: float = Field(default=0.5, gt=0, description="Temperature tau of the contrast (Eq. 3).")
    projection: bool = Field(default=True, description="Put MOON's projection head (256 wide) on the encoder.")


class Moon(Plugin[MoonOptions]):
    """MOON, model-contrastive FL (Li, He, Song, CVPR 2021, arXiv 2103.16257): CE + mu * l_con (Eq. 4).

    l_con (Eq. 3) pulls a sample's representation z towards the global model's and away from that of the
    client's own model of its previous participation.
    """

    neutral = {"mu": 0.0, "projection": False}
    reads = ("global", "previous")

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Contrast projected features, as the paper does."""
        if self.options.projection:
            task.ensure_projection(model)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Tell of an encoder that stays on the clients."""
        encoder = {name for name in setup.layout.trainable if name.startswith("encoder.")}
        if encoder <= setup.layout.personal and (keeper := setup.keeper_of(encoder)):
            reason = f"{keeper!r} keeps the encoder on the clients: the previous and the global one are the same"
            setup.note(self.name, f"{reason}, and the term is constant")

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add l_con; a client's first participation has no previous model, and the official code's term is 0 there."""

        def contrast() -> Tensor | None:
            far, tau = step.frozen("previous"), self.options.temperature
            if far is None:
                return None
            near = step.frozen("global")  # computed on first use: not where there is no term
            return model_contrastive_loss(step.features, near.features, far.features, temperature=tau)

        return Loss(contrast, weight=self.options.mu, name="contrast")
