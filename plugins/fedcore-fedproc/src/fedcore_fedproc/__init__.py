"""FedProc as a fedcore plugin: prototypical contrastive federated learning."""

from __future__ import annotations

from pydantic import Field, model_validator
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Loss, ModelTask, Plugin, ServerContext, SplitModel, Step, hookimpl
from fedcore_functional import PrototypeExchange, PrototypeOptions, UnitLength, contrast_with

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


class FedProc(Plugin[FedProcOptions]):
    """FedProc (Mu et al., FGCS 2023, arXiv 2109.12273): alpha * l_gpc + (1 - alpha) * CE, alpha = 1 - t/T (Eq. 2).

    l_gpc (Eq. 4) pulls a sample's representation z towards the global prototype of its class and away from the
    others'. A prototype is a class's mean z: over its samples, or over the clients' means (``prototype_weights``).
    """

    neutral = {"alpha": 0.0, "projection": False}
    scales_task = True

    def __init__(self, options: FedProcOptions) -> None:
        super().__init__(options)
        self.prototypes = PrototypeExchange(options)

    def alpha(self, at: Step | ClientContext | ServerContext) -> float:
        """Return alpha of the round (Eq. 2); a round without prototypes has no contrast whatever it is."""
        if self.options.two_stage:
            return 1.0 if 2 * at.round < at.rounds else 0.0
        if self.options.alpha is not None:
            return self.options.alpha
        return max(0.0, 1 - at.round / (self.options.schedule_rounds or at.rounds))

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Contrast projected representations, z in R^256 (section 3.3, local network architecture)."""
        if self.options.projection:
            task.ensure_projection(model)
        if self.options.normalize:
            model.encoder.add_module("unit", UnitLength())

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Initialize c^0 (Algorithm 1, line 2)."""
        if self.alpha(server) > 0:
            self.prototypes.begin_round(server)

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor] | None:
        """Send c^t (line 6)."""
        return self.prototypes.broadcast(server) if self.alpha(server) > 0 else None

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's prototypes to the sums of line 9."""
        if self.alpha(server) > 0:
            self.prototypes.accumulate(server, update)

    @hookimpl
    def aggregate(self, server: ServerContext) -> None:
        """Renew the prototypes, c^{t+1} (line 9); the model's aggregation is FedAvg's (line 10)."""
        self.prototypes.aggregate(server)

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def answer(self, client: ClientContext) -> dict[str, Tensor]:
        """Return the client's prototypes under w^0, for c^0."""
        return self.prototypes.own(client)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Make c^t ready for the contrast; fix the features in the second of two stages."""
        self.prototypes.begin_local(client)
        if self.options.two_stage and self.alpha(client) == 0:
            client.freeze(("encoder.*",))

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return alpha * l_gpc, and 1 - alpha for the cross-entropy (Eqs. 2 to 4)."""
        ready = self.prototypes.ready(step.client)
        if ready is None:
            return None
        alpha = self.alpha(step)
        value = contrast_with(step.features, step.y, ready)
        return Loss(value, weight=alpha, task_scale=1 - alpha, name="contrast")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor] | None:
        """Send the trained model's prototypes up (Eq. 5; Algorithm 1, lines 27 to 31)."""
        return self.prototypes.own(client) if self.alpha(client) > 0 else None
