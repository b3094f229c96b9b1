"""FedProc as a fedcore plugin: prototypical contrastive federated learning."""

from __future__ import annotations

from functools import partial

from pydantic import Field, model_validator

from fedcore import ClientContext, Loss, Plugin, ServerContext, SplitModel, Step, hookimpl
from fedcore_functional import FeatureRange, PrototypeExchange, PrototypeOptions, UnitLength, contrast_with

__all__ = ["FedProc", "FedProcOptions"]


class FedProcOptions(PrototypeOptions):
    """Options of FedProc."""

    alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Fixed weight alpha of the contrast (Table 4: 0.5); default 1 - t/T (Eq. 2).",
    )
    schedule_rounds: int | None = Field(
        default=None,
        ge=1,
        description="T of alpha = 1 - t/T. Later rounds have cross-entropy alone. Default: the run's rounds (the "
        "authors' code: 100).",
    )
    two_stage: bool = Field(
        default=False,
        description="Contrast alone in the first half of the rounds, then cross-entropy alone on a frozen encoder "
        "(two-stage FL of Table 4).",
    )
    normalize: bool = Field(
        default=False, description="Scale z to unit length where the projection head ends, as the authors' code does."
    )

    @model_validator(mode="after")
    def _one_schedule(self) -> FedProcOptions:
        if self.two_stage and self.alpha is not None:
            raise ValueError("two_stage sets alpha to 1 and then to 0; leave alpha out")
        if self.schedule_rounds is not None and (self.two_stage or self.alpha is not None):
            raise ValueError("schedule_rounds is T of alpha = 1 - t/T; leave it out, or leave out alpha and two_stage")
        if self.normalize and not self.projection:
            raise ValueError("normalize scales what the projection head returns; leave projection=false out")
        return self


def alpha_of(options: FedProcOptions, at: Step | ClientContext | ServerContext) -> float:
    """Return alpha of the round (Eq. 2). A round without prototypes has no contrast, whatever alpha is."""
    if options.two_stage:
        return 1.0 if 2 * at.round < at.rounds else 0.0
    if options.alpha is not None:
        return options.alpha
    return max(0.0, 1 - at.round / (options.schedule_rounds or at.rounds))


class FedProc(Plugin[FedProcOptions]):
    """FedProc (Mu et al., FGCS 2023, arXiv 2109.12273): alpha * l_gpc + (1 - alpha) * CE, alpha = 1 - t/T (Eq. 2).

    l_gpc (Eq. 4) pulls a sample's representation z (in R^256, section 3.3) towards the global prototype of its class,
    and away from the prototypes of the other classes. A prototype is the mean z of a class: over its samples, or over
    the clients' means (``prototype_weights``).
    """

    neutral = {"alpha": 0.0, "projection": False}
    scales_task = True

    def __init__(self, options: FedProcOptions) -> None:
        super().__init__(options)
        self.assumes = ("rounds",) if options.alpha is None and options.schedule_rounds is None else ()
        within = FeatureRange(1.0) if options.normalize else FeatureRange()
        exchange = PrototypeExchange(options, within=within, contrasts=lambda at: alpha_of(options, at) > 0)
        self.parts = (exchange,)  # c^t: Algorithm 1, lines 2, 6, 9 and 27 to 31; Eq. 5

    @hookimpl
    def configure_model(self, model: SplitModel) -> None:
        """Scale z to unit length if ``normalize`` is set."""
        if self.options.normalize:
            model.encoder.add_module("unit", UnitLength())

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Freeze the encoder in the second of two stages."""
        if self.options.two_stage and alpha_of(self.options, client) == 0:
            client.freeze(("encoder.*",))

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return alpha * l_gpc, and 1 - alpha for the cross-entropy (Eqs. 2 to 4)."""
        ready = PrototypeExchange.ready(step.client)
        if ready is None:
            return None
        alpha = alpha_of(self.options, step)
        contrast = partial(contrast_with, step.features, step.y, ready)
        return Loss(contrast, weight=alpha, task_scale=1 - alpha, name="contrast")
