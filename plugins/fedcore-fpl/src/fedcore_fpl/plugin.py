"""The FPL plugin."""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field

from fedcore import ClientContext, ClientUpdate, Loss, Plugin, PluginOptions, ServerContext, Step, Tensors, hookimpl
from fedcore_fpl import equations as eq
from fedcore_functional import check_prototypes, class_means, class_prototypes, prototype_distance


class FPLOptions(PluginOptions):
    """Options of FPL."""

    temperature: float = Field(default=0.02, gt=0, le=1e4, description="tau of the contrast with cluster prototypes.")
    contrast: float = Field(default=1.0, ge=0, description="Weight of L_CPCL; 0 leaves it out.")
    consistency: float = Field(default=1.0, ge=0, description="Weight of L_UPCR; 0 leaves it out.")


class FPL(Plugin[FPLOptions]):
    """FPL, federated prototype learning (Huang, Ye, Shi, Li, Du, CVPR 2023): CE + L_CPCL + L_UPCR.

    The server clusters the clients' prototypes of each class by FINCH. L_CPCL contrasts a feature with the cluster
    prototypes: its class's attract, the others repel. L_UPCR is its squared distance from its class's unbiased
    prototype, the mean of the cluster prototypes, in which a frequent domain counts no more than a rare one.
    """

    neutral = {"contrast": 0.0, "consistency": 0.0}
    assumes = ("one-model", "classes")

    @property
    def _used(self) -> bool:
        return self.options.contrast > 0 or self.options.consistency > 0

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Take the unbiased prototypes of this round, the means of the cluster prototypes."""
        if client.received:
            clusters, classes = client.received["clusters"], client.received["classes"]
            unbiased, counts = class_means(clusters, classes, client.num_classes)
            client.scratch.update(unbiased=unbiased, known=counts > 0)

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss] | None:
        """Return L_CPCL and L_UPCR; nothing in a round without prototypes."""
        received, scratch, options = step.client.received, step.client.scratch, self.options
        if not received:
            return None
        clusters, tau = (received["clusters"], received["classes"]), options.temperature
        contrast = partial(eq.cluster_contrast, step.features, step.y, *clusters, temperature=tau)
        distance = partial(prototype_distance, step.features, step.y, scratch["unbiased"], scratch["known"])
        return [
            Loss(contrast, weight=options.contrast, name="contrast"),
            Loss(distance, weight=options.consistency, name="consistency"),
        ]

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors | None:
        """Send the class means of the trained model's features."""
        if not self._used:
            return None
        features, _, labels = client.forward()
        return class_prototypes(features, labels, client.num_classes)

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def broadcast(self, server: ServerContext) -> Tensors | None:
        """Send the cluster prototypes with their classes, once they exist."""
        return dict(server.state) if self._used and "clusters" in server.state else None

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Keep one client's prototypes until the end of the round."""
        if not self._used:
            return
        width, samples = server.feature_dim, update.samples
        check_prototypes(update.payload, server.num_classes, width, weights="clients", samples=samples)
        for name in ("prototypes", "known"):
            server.state[f"{update.client}:{name}"] = update.payload.pop(name)

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Cluster the prototypes of the round's clients."""
        if not self._used:
            return
        sent = {
            name: torch.stack([server.state.pop(f"{client}:{name}") for client in sorted(server.accepted)])
            for name in ("prototypes", "known")
        }
        server.state["clusters"], server.state["classes"] = eq.cluster_prototypes(sent["prototypes"], sent["known"])
