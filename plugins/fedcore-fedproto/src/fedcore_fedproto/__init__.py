# --8<-- [start:options]
"""FedProto as a fedcore plugin."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Loss, Plugin, PluginOptions, ServerContext, SplitModel, Step, hookimpl
from fedcore_fedproto.equations import NearestPrototype
from fedcore_functional import (
    add_prototypes,
    check_prototypes,
    class_prototypes,
    mean_over_holders,
    prototype_distance,
)

__all__ = ["FedProto", "FedProtoOptions"]


class FedProtoOptions(PluginOptions):
    """Options of FedProto."""

    lambda_: float = Field(
        default=1.0, ge=0, alias="lambda", description="lambda: weight of the distance to the prototypes."
    )
    personal: bool = Field(
        default=True, description="Keep every model on its client, as in the paper; false averages them."
    )
    nearest: bool = Field(
        default=True, description="Evaluate a client by its nearest prototype, else by its classifier."
    )
    # --8<-- [end:options]


# --8<-- [start:class]
class FedProto(Plugin[FedProtoOptions]):
    """FedProto (Tan et al., AAAI 2022, arXiv 2105.00243): CE + lambda * mean (z - C_y)^2; prototypes are averaged.

    C_y is the global prototype of a sample's class: the mean over the clients that hold the class of their mean z.
    Models stay on the clients.
    """

    neutral = {"lambda": 0.0, "personal": False, "nearest": False}
    assumes = ("classes",)
    # --8<-- [end:class]

    # --8<-- [start:local_loss]
    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Pull the features to the global prototypes of their classes."""
        received = step.client.received
        if not received:
            return None  # no client has sent prototypes before the first round
        return Loss(
            lambda: prototype_distance(step.features, step.y, received["prototypes"], received["known"]),
            weight=self.options.lambda_,
            name="distance",
        )

    # --8<-- [end:local_loss]
    # --8<-- [start:end_local]
    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send the client's prototypes up: mean features of its own classes under the trained model."""
        features, _, labels = client.forward()
        return class_prototypes(features, labels, client.num_classes)

    # --8<-- [end:end_local]
    # --8<-- [start:server]
    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's prototypes to sums by class. Malformed ones raise, and the client is left out."""
        classes, width = server.num_classes, server.feature_dim
        check_prototypes(update.payload, classes, width, weights="clients", samples=update.samples)
        server.state.update(add_prototypes(server.state, update.payload))
        update.payload.clear()

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Divide the sums by the clients that hold the class; a class that no client held keeps its prototype."""
        if "sums" in server.state:
            total = {name: server.state.pop(name) for name in ("sums", "weights")}
            server.state.update(mean_over_holders(total, server.state))

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor] | None:
        """Send the global prototypes down; there are none in the first round."""
        if "known" not in server.state:
            return None
        return {"prototypes": server.state["prototypes"], "known": server.state["known"]}

    # --8<-- [end:server]
    # --8<-- [start:personal_parameters]
    @hookimpl
    def personal_parameters(self) -> list[str] | None:
        """Keep every parameter on its client."""
        return ["*"] if self.options.personal else None

    # --8<-- [end:personal_parameters]
    # --8<-- [start:personal_model]
    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | NearestPrototype | None:
        """Predict the class whose global prototype is nearest."""
        if not self.options.nearest or not client.received:
            return None
        return NearestPrototype(client.model, client.received["prototypes"], client.received["known"])

    # --8<-- [end:personal_model]
