"""The FedECCR plugin: stage 1, prototype contrast, in front of USCC."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Loss, ModelTask, ServerContext, SplitModel, Step, hookimpl
from fedcore import prototypes as proto
from fedcore.functional import contrast_with, ready_prototypes
from fedcore_fedeccr.uscc import Uscc, UsccOptions


class FedECCROptions(UsccOptions):
    """Options of FedECCR: those of stage 1, and USCC's."""

    temperature: float = Field(0.5, gt=0, description="tau of the contrast (Eq. 1); the paper takes 0.5 or 1.")
    denominator: Literal["all", "others"] = Field(
        "all", description="Classes in the contrast's denominator: all (Algorithm 1) or all but the own (Eq. 1)."
    )
    contrast_weight: float = Field(
        1.0, gt=0, description="Factor w on Loss_pc; the paper takes 0.1 on nearly uniform data (beta = 5)."
    )
    init: Literal["query", "random"] = Field(
        "query", description="First prototypes z_0: the cohort's means under w_0, or unit vectors drawn from the seed."
    )
    projection: bool = Field(True, description="Put the projection head (256 wide) on the encoder.")
    correct: bool = Field(True, description="Stage 2, USCC, after the last round; without it stage 1 alone.")


class FedECCR(Uscc):
    """FedECCR (Zeng et al., CollaborateCom 2023): alpha * Loss_pc + (1 - alpha) * CE, alpha = 1 - r/R; then USCC.

    Loss_pc (Algorithm 1 line 16) pulls a sample's feature towards the global prototype of its class and away
    from the others'. A prototype is a class's mean feature, averaged over the clients that hold the class.
    """

    Options = FedECCROptions
    neutral = None
    scales_task = True
    options: FedECCROptions

    def __init__(self, options: FedECCROptions) -> None:
        super().__init__(options)
        self.corrects = Uscc.corrects if options.correct else ()

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Contrast projected features, so that stage 1 at temperature 1 is FedProc."""
        if self.options.projection:
            task.ensure_projection(model)

    # --- stage 1 on the server -----------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Initialize the global prototypes z_0 (Algorithm 1, line 2), in the first round that comes to something."""
        if "prototypes" not in server.state:
            server.state.update(self._first(server))

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send z_r (line 5)."""
        return {name: server.state[name] for name in ("prototypes", "known") if name in server.state}

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's prototypes to the sum over clients (line 8)."""
        proto.check_prototypes(update.payload, server.num_classes, server.feature_dim)
        before = server.state if "sums" in server.state else {}
        server.state.update(proto.add_prototypes(before, update.payload))
        update.payload.clear()

    @hookimpl
    def aggregate(self, server: ServerContext) -> None:
        """Renew the prototypes, z_{r+1} (Eq. 2; line 8)."""
        total = {"sums": server.state.pop("sums"), "holders": server.state.pop("holders")}
        server.state.update(proto.mean_over_holders(total, server.state))

    def _first(self, server: ServerContext) -> dict[str, Tensor]:
        if self.options.init == "query":
            check = partial(proto.check_prototypes, num_classes=server.num_classes, width=server.feature_dim)
            return proto.first_prototypes(server.ask("prototypes", clients="cohort", check=check))
        return proto.random_prototypes(server.num_classes, server.feature_dim, server.generator("prototypes"))

    # --- stage 1 on a client -------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Make z_r ready for the contrast."""
        client.scratch["prototypes"] = ready_prototypes(
            client.received["prototypes"], temperature=self.options.temperature, known=client.received["known"]
        )

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Return alpha * w * Loss_pc, and 1 - alpha for the cross-entropy (Eq. 3; lines 16 to 18)."""
        alpha = 1 - step.round / step.rounds
        ready = step.client.scratch["prototypes"]
        value = contrast_with(step.features, step.y, ready, denominator=self.options.denominator)
        return Loss(value, weight=alpha * self.options.contrast_weight, task_scale=1 - alpha, name="contrast")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send the trained model's prototypes up (Eq. 2; lines 23 to 28)."""
        features, _, labels = client.forward()
        return proto.class_prototypes(features, labels, client.num_classes)

    # --- both stages ---------------------------------------------------------------------------------------

    @hookimpl
    def answer(self, client: ClientContext, question: str) -> dict[str, Tensor] | None:
        """Return the client's prototypes under w_0 for z_0; else its statistics, for USCC."""
        return self.end_local(client) if question == "prototypes" else super().answer(client, question)

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Correct the classifier by USCC."""
        if self.options.correct:
            super().post_train(server)
