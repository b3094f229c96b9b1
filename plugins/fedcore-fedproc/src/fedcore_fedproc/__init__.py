"""FedProc as a fedcore plugin: prototypical contrastive federated learning."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    ModelTask,
    Plugin,
    PluginOptions,
    ServerContext,
    SplitModel,
    Step,
    hookimpl,
)
from fedcore.functional import contrast_with, ready_prototypes
from fedcore.prototypes import (
    add_prototypes,
    check_prototypes,
    class_prototypes,
    first_prototypes,
    mean_over_holders,
    random_prototypes,
)

__all__ = ["FedProc", "FedProcOptions"]


class FedProcOptions(PluginOptions):
    """Options of FedProc."""

    alpha: float | None = Field(
        None, ge=0, le=1, description="Fixed weight alpha of the contrast (Table 4: 0.5); default 1 - t/T (Eq. 2)."
    )
    two_stage: bool = Field(
        False,
        description="Contrast alone in the first half of the rounds, then cross-entropy alone on a frozen encoder "
        "(two-stage FL of Table 4).",
    )
    init: Literal["query", "random"] = Field(
        "query", description="First prototypes c^0: the cohort's means under w^0, or unit vectors drawn from the seed."
    )
    projection: bool = Field(True, description="Put the projection head (256 wide) on the encoder.")

    @model_validator(mode="after")
    def _one_schedule(self) -> FedProcOptions:
        if self.two_stage and self.alpha is not None:
            raise ValueError("two_stage sets alpha to 1 and then to 0; leave alpha out")
        return self


class FedProc(Plugin):
    """FedProc (Mu et al., FGCS 2023, arXiv 2109.12273): alpha * l_gpc + (1 - alpha) * CE, alpha = 1 - t/T (Eq. 2).

    l_gpc (Eq. 4) pulls a sample's representation z towards the global prototype of its class and away from the
    others'. A prototype is a class's mean z, averaged over the clients that hold the class.
    """

    Options = FedProcOptions
    neutral = {"alpha": 0.0, "projection": False}
    scales_task = True
    options: FedProcOptions

    def alpha(self, at: Step | ClientContext | ServerContext) -> float:
        """Return alpha of the round."""
        if self.options.two_stage:
            return 1.0 if 2 * at.round < at.rounds else 0.0
        return 1 - at.round / at.rounds if self.options.alpha is None else self.options.alpha

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Contrast projected representations, z in R^256 (section 3.3, local network architecture)."""
        if self.options.projection:
            task.ensure_projection(model)

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Initialize c^0 (Algorithm 1, line 2), in the first round that comes to something."""
        if "prototypes" in server.state or self.alpha(server) == 0:
            return
        if self.options.init == "query":
            check = partial(check_prototypes, num_classes=server.num_classes, width=server.feature_dim)
            first = first_prototypes(server.ask("prototypes", clients="cohort", check=check))
        else:
            first = random_prototypes(server.num_classes, server.feature_dim, server.generator("prototypes"))
        server.state.update(first)

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor] | None:
        """Send c^t (line 6)."""
        if self.alpha(server) == 0 or not server.state:
            return None
        return {"prototypes": server.state["prototypes"], "known": server.state["known"]}

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's prototypes to the sums of line 9."""
        if self.alpha(server) > 0:
            check_prototypes(update.payload, server.num_classes, server.feature_dim)
            before = server.state if "sums" in server.state else {}
            server.state.update(add_prototypes(before, update.payload))
            update.payload.clear()

    @hookimpl
    def aggregate(self, server: ServerContext) -> None:
        """Renew the prototypes, c^{t+1} (line 9); the model's aggregation is FedAvg's (line 10)."""
        if "sums" in server.state:
            total = {"sums": server.state.pop("sums"), "holders": server.state.pop("holders")}
            server.state.update(mean_over_holders(total, server.state))

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def answer(self, client: ClientContext) -> dict[str, Tensor]:
        """Return the client's prototypes under w^0, for c^0."""
        return _own_prototypes(client)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Make c^t ready for the contrast; fix the features in the second of two stages."""
        if self.alpha(client) > 0:
            prototypes, known = client.received["prototypes"], client.received["known"]
            client.scratch["prototypes"] = ready_prototypes(prototypes, known=known)
        elif self.options.two_stage:
            client.freeze(("encoder.*",))

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return alpha * l_gpc, and 1 - alpha for the cross-entropy (Eqs. 2 to 4)."""
        alpha = self.alpha(step)
        if alpha == 0:
            return None
        value = contrast_with(step.features, step.y, step.client.scratch["prototypes"])
        return Loss(value, weight=alpha, task_scale=1 - alpha, name="contrast")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor] | None:
        """Send the trained model's prototypes up (Eq. 5; Algorithm 1, lines 27 to 31)."""
        return _own_prototypes(client) if self.alpha(client) > 0 else None


def _own_prototypes(client: ClientContext) -> dict[str, Tensor]:
    features, _, labels = client.forward()
    return class_prototypes(features, labels, client.num_classes)
