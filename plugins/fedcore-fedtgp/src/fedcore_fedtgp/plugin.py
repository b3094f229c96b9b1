"""The FedTGP plugin."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcore import ClientContext, ClientUpdate, Loss, Plugin, PluginOptions, ServerContext, Step, Tensors, hookimpl
from fedcore.models import Outputs
from fedcore_fedtgp import equations as eq
from fedcore_functional import add_prototypes, check_prototypes, class_prototypes, mean_over_holders, prototype_distance

PARAMETERS = "tgp."
"""Prefix of the server's parameters in its state."""


class FedTGPOptions(PluginOptions):
    """Options of FedTGP."""

    lambda_: float = Field(
        default=1.0, ge=0, alias="lambda", description="lambda: weight of the distance from the global prototypes."
    )
    threshold: float = Field(default=100.0, ge=0, description="tau: most that the adaptive margin can be; 0 is none.")
    server_epochs: int = Field(
        default=100, ge=1, le=100_000, description="S: epochs in which the server trains its prototypes in a round."
    )
    server_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of that training; default the round's local one."
    )
    server_batch_size: int = Field(
        default=10, ge=1, le=1_000_000, description="Clients' prototypes per mini-batch of that training."
    )


class FedTGP(Plugin[FedTGPOptions]):
    """FedTGP, trainable global prototypes (Zhang, Liu, Hua, Cao, AAAI 2024, arXiv 2401.03230).

    Models stay on the clients. A client sends the mean feature of each of its classes. The server trains global
    prototypes by a contrast with what it received, in which a class's own prototype is handicapped by an adaptive
    margin. Clients minimise CE + lambda * (distance of the features from the global prototypes), and classify by the
    nearest of them.
    """

    assumes = ("classes",)

    @hookimpl
    def personal_parameters(self) -> list[str]:
        """Keep the whole model, buffers included, on each client."""
        return ["*"]

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return lambda times the squared distance from the global prototypes; nothing before these exist."""
        if not step.client.received:
            return None
        distance = partial(prototype_distance, step.features, step.y, step.client.received["prototypes"])
        return Loss(distance, weight=self.options.lambda_, name="prototypes")

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors:
        """Send P_i^c, the class means of the trained model's features."""
        features, _, labels = client.forward()
        return class_prototypes(features, labels, client.num_classes)

    @hookimpl
    def personal_model(self, client: ClientContext) -> nn.Module | None:
        """Classify by the nearest global prototype, once there are some."""
        return PrototypeModel(client.network(), client.received["prototypes"]) if client.received else None

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Draw the server's parameters before the first round."""
        if PARAMETERS + "embedding" not in server.state:
            drawn = eq.first_parameters(server.num_classes, server.feature_dim, server.generator("prototypes"))
            server.state.update({PARAMETERS + name: tensor for name, tensor in drawn.items()})

    @hookimpl
    def broadcast(self, server: ServerContext) -> Tensors | None:
        """Send the global prototypes, once they were trained."""
        return {"prototypes": server.state["prototypes"]} if "prototypes" in server.state else None

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Keep one client's prototypes until the end of the round."""
        width, samples = server.feature_dim, update.samples
        check_prototypes(update.payload, server.num_classes, width, weights="clients", samples=samples)
        for name in ("prototypes", "known"):
            server.state[f"{update.client}:{name}"] = update.payload.pop(name)

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Train the global prototypes on the clients' prototypes."""
        sent, labels, margin = self._received(server)
        options = self.options
        parameters = {
            name.removeprefix(PARAMETERS): value for name, value in server.state.items() if name.startswith(PARAMETERS)
        }
        parameters = eq.trained(
            parameters,
            sent,
            labels,
            margin=margin,
            epochs=options.server_epochs,
            lr=options.server_lr or server.lr,
            batch_size=options.server_batch_size,
            generator=server.generator("server training"),
        )
        server.state.update({PARAMETERS + name: tensor for name, tensor in parameters.items()})
        server.state["prototypes"] = eq.prototypes_of(parameters)

    def _received(self, server: ServerContext) -> tuple[Tensor, Tensor, float]:
        """Return the clients' prototypes (n, d), their classes (n,) and delta, and drop them from the state."""
        sent, labels, total = [], [], Tensors()
        for client in sorted(server.accepted):
            own = {name: server.state.pop(f"{client}:{name}") for name in ("prototypes", "known")}
            sent.append(own["prototypes"][own["known"]])
            labels.append(own["known"].nonzero().flatten())
            total = add_prototypes(total, own)
        mean = mean_over_holders(total)
        margin = eq.adaptive_margin(mean["prototypes"], mean["known"], self.options.threshold)
        return torch.cat(sent).float(), torch.cat(labels), margin


class PrototypeModel(nn.Module):
    """A client's model that classifies by the nearest prototype: a logit is minus the mean squared distance."""

    def __init__(self, model: nn.Module, prototypes: Tensor) -> None:
        super().__init__()
        self.model = model
        self.prototypes = nn.Parameter(prototypes, requires_grad=False)

    def forward(self, x: Any) -> Outputs:
        """Return features (B, d) and logits (B, C)."""
        features = self.model(x).features
        return Outputs(features, -(features.unsqueeze(1) - self.prototypes).square().mean(dim=2))
