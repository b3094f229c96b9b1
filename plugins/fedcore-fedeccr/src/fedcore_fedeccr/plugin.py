"""The FedECCR plugin: stage 1, prototype contrast, in front of USCC."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Loss, ModelTask, ServerContext, SplitModel, Step, hookimpl
from fedcore_fedeccr.uscc import Uscc, UsccOptions
from fedcore_functional import PrototypeExchange, PrototypeOptions, contrast_with


class FedECCROptions(UsccOptions, PrototypeOptions):
    """Options of FedECCR: stage 1's and USCC's."""

    temperature: float = Field(default=0.5, gt=0, description="tau of the contrast (Eq. 1); the paper takes 0.5 or 1.")
    denominator: Literal["all", "others"] = Field(
        default="all",
        description="Classes in the contrast's denominator: all (Algorithm 1) or all but the own (Eq. 1).",
    )
    contrast_weight: float = Field(
        default=1.0, gt=0, description="Factor w on Loss_pc; the paper takes 0.1 on nearly uniform data (beta = 5)."
    )
    correct: bool = Field(default=True, description="Stage 2, USCC, after the last round; without it stage 1 alone.")


class FedECCR(Uscc):
    """FedECCR (Zeng et al., CollaborateCom 2023): alpha * Loss_pc + (1 - alpha) * CE, alpha = 1 - r/R; then USCC.

    Loss_pc (Algorithm 1 line 16) pulls a sample's feature towards the global prototype of its class and away
    from the others'. A prototype is a class's mean feature: over its samples, or over the clients' means
    (``prototype_weights``).
    """

    Options = FedECCROptions
    neutral = None
    scales_task = True
    options: FedECCROptions

    def __init__(self, options: FedECCROptions) -> None:
        super().__init__(options)
        self.corrects = Uscc.corrects if options.correct else ()
        self.prototypes = PrototypeExchange(options)

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Contrast projected features, so that stage 1 at temperature 1 is FedProc."""
        if self.options.projection:
            task.ensure_projection(model)

    # --- stage 1 on the server -----------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Initialize the global prototypes z_0 (Algorithm 1, line 2)."""
        self.prototypes.begin_round(server)

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor] | None:
        """Send z_r (line 5)."""
        return self.prototypes.broadcast(server)

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's prototypes, times their weights, to the sums of line 8."""
        self.prototypes.accumulate(server, update)

    @hookimpl
    def aggregate(self, server: ServerContext) -> None:
        """Renew the prototypes, z_{r+1} (Eq. 2; line 8)."""
        self.prototypes.aggregate(server)

    # --- stage 1 on a client -------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Make z_r ready for the contrast."""
        self.prototypes.begin_local(client, temperature=self.options.temperature)

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return alpha * w * Loss_pc, and 1 - alpha for the cross-entropy (Eq. 3; lines 16 to 18)."""
        ready = self.prototypes.ready(step.client)
        if ready is None:
            return None
        alpha = 1 - step.round / step.rounds
        value = contrast_with(step.features, step.y, ready, denominator=self.options.denominator)
        return Loss(value, weight=alpha * self.options.contrast_weight, task_scale=1 - alpha, name="contrast")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send the trained model's prototypes up (Eq. 2; lines 23 to 28)."""
        return self.prototypes.own(client)

    # --- both stages ---------------------------------------------------------------------------------------

    @hookimpl
    def answer(self, client: ClientContext, question: str) -> dict[str, Tensor] | None:
        """Return the client's prototypes under w_0 for z_0; else its statistics, for USCC."""
        return self.prototypes.own(client) if question == "prototypes" else super().answer(client, question)

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Correct the classifier by USCC."""
        if self.options.correct:
            super().post_train(server)
