"""The FedPAC plugin."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    Plugin,
    PluginOptions,
    RunSetup,
    ServerContext,
    SplitModel,
    Step,
    Tensors,
    check_tensors,
    hookimpl,
)
from fedcore_fedpac import equations as eq
from fedcore_functional import (
    add_prototypes,
    check_prototypes,
    class_means,
    class_prototypes,
    mean_over_holders,
    prototype_distance,
    refuse_changed_counts,
)

HEAD, EXTRACTOR = "classifier.", "encoder.*"
STATISTICS = ("variance", "means")


class FedPACOptions(PluginOptions):
    """Options of FedPAC."""

    lambda_: float = Field(
        default=1.0, ge=0, alias="lambda", description="lambda: weight of the features' distance from the centroids."
    )
    combine: bool = Field(default=True, description="Combine the clients' heads; false keeps each client's own.")
    head_epochs: int = Field(
        default=1, ge=1, le=1_000_000, description="First local epochs, in which the head is trained; then the encoder."
    )
    head_lr: float | None = Field(
        default=0.1, gt=0, le=1e6, description="Learning rate of the head; null is the round's."
    )


class HeadRate(Plugin[FedPACOptions]):
    """The part of FedPAC that needs the hook ``gradients``, which only one plugin can have."""

    @hookimpl
    def gradients(self, step: Step, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Scale the head's gradients, so that its learning rate is ``head_lr``."""
        scale = step.client.scratch["scale"]
        return {name: value * scale if name.startswith(HEAD) else value for name, value in gradients.items()}


class FedPAC(Plugin[FedPACOptions]):
    """FedPAC (Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867): feature alignment and classifier collaboration.

    Clients share the encoder, and each has its own head. A client trains its head first, then the encoder by CE +
    lambda * (distance of the features from the global class centroids). The server combines the heads for each client,
    by the shares that minimise variance and bias of the combination.
    """

    assumes = ("classes",)

    def __init__(self, options: FedPACOptions) -> None:
        super().__init__(options)
        self.starts = (HEAD + "*",) if options.combine else ()
        self.parts = () if options.head_lr is None else (HeadRate(options),)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse methods that count steps, of which each part takes fewer; tell of an encoder that nobody trains."""
        refuse_changed_counts(setup, self.name)
        setup.plugins.require_unfrozen_steps(self.name)
        (unit, work), first = setup.config.local_work, self.options.head_epochs
        if unit == "epochs" and work <= first:
            problem = f"{work} local epochs are all for the head, and the encoder is never trained"
        elif unit == "steps":
            problem = (
                f"a client whose {work} local steps are no more than {first} of its epochs never trains the encoder"
            )
        else:
            return
        setup.note(self.name, f"{problem}; use --local-epochs {first + 1} or more")

    @hookimpl
    def personal_parameters(self) -> list[str]:
        """Keep the heads apart: none is averaged."""
        return [HEAD + "*"]

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> Tensors | None:
        """Start from the combined head; take the statistics of the received encoder, and the centroids."""
        client.freeze([EXTRACTOR], epochs=slice(0, self.options.head_epochs))
        client.freeze([HEAD + "*"], epochs=slice(self.options.head_epochs, None))
        features, _, labels = client.forward()
        statistics = eq.head_statistics(features, labels, client.num_classes)
        client.scratch.update(zip(STATISTICS, statistics, strict=True))
        if "prototypes" in client.received:
            own, known = class_means(features, labels, client.num_classes)[0], client.received["known"]
            client.scratch["centroids"] = torch.where(known.unsqueeze(1), client.received["prototypes"], own)
        if self.options.head_lr is not None:
            client.scratch["scale"] = torch.tensor(self.options.head_lr / client.lr, device=client.device)
        return _head(client) or None

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return lambda times the features' squared distance from the centroids, in the encoder's epochs."""
        if "centroids" not in step.client.scratch or step.epoch < self.options.head_epochs:
            return None
        distance = partial(prototype_distance, step.features, step.y, step.client.scratch["centroids"])
        return Loss(distance, weight=self.options.lambda_, name="alignment")

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors:
        """Send the trained model's centroids with the class counts, the statistics, and the head."""
        features, _, labels = client.forward()
        sent = class_prototypes(features, labels, client.num_classes, weights="samples")
        if self.options.combine:
            head = client.model.classifier.state_dict()
            sent |= {name: client.scratch[name] for name in STATISTICS}
            sent |= {HEAD + name: tensor.detach().clone() for name, tensor in head.items()}
        return sent

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | None:
        """Evaluate the global encoder with the combined head."""
        head = _head(client)
        return client.network(head) if head else None

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def broadcast(self, server: ServerContext) -> Tensors | None:
        """Send the global centroids, once they exist."""
        if "prototypes" not in server.state:
            return None
        return {name: server.state[name] for name in ("prototypes", "known")}

    @hookimpl
    def broadcast_to(self, server: ServerContext, client: int) -> Tensors | None:
        """Send a client's combined head, once it took part."""
        prefix = f"{client}:{HEAD}"
        return {n.partition(":")[2]: server.state[n] for n in server.state if n.startswith(prefix)} or None

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's centroids to the round's sums, and keep its head and statistics until the round's end."""
        sent, width = dict(update.payload), server.feature_dim
        centroids: Tensors = {name: sent.pop(name) for name in ("prototypes", "counts") if name in sent}
        check_prototypes(centroids, server.num_classes, width, weights="samples", samples=update.samples)
        expected: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
        if self.options.combine:
            expected = {"variance": ((), torch.float64), "means": ((server.num_classes, width), torch.float64)}
            expected |= {n: (tuple(t.shape), t.dtype) for n, t in server.model.items() if n.startswith(HEAD)}
        check_tensors(sent, expected)
        server.state.update(add_prototypes(server.state, centroids))
        server.state.update({f"{update.client}:{name}": tensor for name, tensor in sent.items()})
        update.payload.clear()

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Renew the centroids, and combine the heads for each client of the round."""
        state = server.state
        total = {name: state.pop(name) for name in ("sums", "weights")}
        state.update(mean_over_holders(total, state if "prototypes" in state else None))
        if not self.options.combine:
            return
        clients = sorted(server.accepted)
        variances, means = (torch.stack([state.pop(f"{i}:{name}") for i in clients]) for name in STATISTICS)
        heads = {n: torch.stack([state[f"{i}:{n}"] for i in clients]) for n in server.model if n.startswith(HEAD)}
        for place, client in enumerate(clients):
            shares = eq.combination(variances, means, place)
            for name, each in heads.items():
                state[f"{client}:{name}"] = torch.tensordot(shares, each.double(), dims=1).to(each.dtype)


def _head(client: ClientContext) -> Tensors:
    """Return the combined head as received; empty before the client took part."""
    return {name: tensor for name, tensor in client.received.items() if name.startswith(HEAD)}
