"""The FedCME plugin: the place of each equation, and the tensors that travel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Exchange,
    Loss,
    ModelTask,
    Plugin,
    RunSetup,
    ServerContext,
    SplitModel,
    Step,
    check_tensors,
    hookimpl,
)
from fedcore_fedcme import equations as eq
from fedcore_fedcme.matching import match_clients, match_many_to_one
from fedcore_functional import FeatureOptions, check_means, class_sums, move_split

PARTS = {"classifier": ("classifier.*",), "encoder": ("encoder.*",), "model": ("*",), "none": ()}


class FedCMEOptions(FeatureOptions):
    """Options of FedCME. The defaults are the paper's."""

    mu: float = Field(default=0.01, ge=0, description="mu of Eq. 10: weight of the feature alignment (Eq. 9).")
    distance: Literal["mean", "sum"] = Field(
        default="mean",
        description="Squared norm of Eq. 9: the mean over the features, or their sum, which grows with their number.",
    )
    align: bool = Field(default=True, description="Feature alignment; without it exchange only (FedCME-OE).")
    exchange: Literal["classifier", "encoder", "model", "none"] = Field(
        default="classifier",
        description="What matched clients swap: encoder is FedCME-FE, model FedCME-WM, none FedCME-OL.",
    )
    classifier_layers: int = Field(
        default=1, ge=1, description="Last linear layers that form the classifier; the features are taken before them."
    )
    matching: Literal["one-to-one", "many-to-one"] = Field(
        default="one-to-one", description="Pairs, or each client receives from the client least like it (FedCME-MTO)."
    )
    evaluation_fraction: float = Field(
        default=0.2, gt=0, le=1, description="Part of its own samples on which a client evaluates itself (Eq. 4)."
    )


def middle(local_epochs: int) -> set[int]:
    """Return the epoch at whose start clients exchange, floor(E / 2) (Algorithm 2 line 4). One epoch has no middle."""
    return {local_epochs // 2} - {0}


class LayerExchange(Plugin[FedCMEOptions]):
    """Matched clients swap parts of their models in the middle of local training (section IV-A)."""

    def __init__(self, options: FedCMEOptions) -> None:
        super().__init__(options)
        self.exchanges = Exchange(PARTS[options.exchange], middle)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Tell of local training without a middle."""
        if not middle(setup.config.local_epochs):
            setup.note(
                self.name, "one local epoch has no middle, so nothing is exchanged; use --local-epochs 2 or more"
            )

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Match the cohort by the last evaluation vectors of its clients (Algorithm 1 line 4)."""
        if "vectors" not in server.state:
            server.state["vectors"] = torch.zeros(server.num_clients, server.num_classes, dtype=torch.float64)
        match = match_clients if self.options.matching == "one-to-one" else match_many_to_one
        donors = match({client: server.state["vectors"][client] for client in server.cohort})
        server.state["donors"] = sorted([receiver, donor] for receiver, donor in donors.items())

    @hookimpl
    def mid_local_epoch(
        self, server: ServerContext, snapshots: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[int, Mapping[str, Tensor]]:
        """Give each client its counterpart's layers. If the counterpart failed or diverged, it keeps its own layers."""
        usable = {client for client, part in snapshots.items() if all(bool(t.isfinite().all()) for t in part.values())}
        donors = {receiver: donor for receiver, donor in server.state["donors"] if receiver in usable}
        left_alone = [[server.round, receiver, donor] for receiver, donor in donors.items() if donor not in usable]
        for _, receiver, donor in left_alone:
            server.note(
                f"client {receiver} keeps its own {self.options.exchange}, because "
                f"its counterpart, client {donor}, failed or diverged before the exchange"
            )
        if left_alone:
            server.state["left_alone"] = server.state.get("left_alone", []) + left_alone
        return {receiver: snapshots[donor] for receiver, donor in donors.items() if donor in usable}

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send the evaluation vector (Eq. 4)."""
        _, logits, labels = client.forward(self._evaluation_part(client))
        return {"vector": eq.evaluation_vector(logits, labels, client.num_classes)}

    def _evaluation_part(self, client: ClientContext) -> Tensor:
        """Return the positions of D_k^eval. They are drawn once per client and kept."""
        if "evaluation" not in client.state:
            size = max(1, round(self.options.evaluation_fraction * client.n))
            order = torch.randperm(client.n, generator=client.generator("evaluation"))
            client.state["evaluation"] = order[:size].sort().values
        part: Tensor = client.state["evaluation"].cpu()
        return part

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Keep the client's vector."""
        check_tensors(update.payload, {"vector": ((server.num_classes,), torch.float64)})
        vector = update.payload["vector"].cpu()
        if not 0 <= float(vector.min()) <= float(vector.max()) <= 1:
            raise ValueError(f"'vector' is {vector.tolist()}, expected accuracies from 0 to 1")
        server.state["vectors"][update.client] = vector


class FeatureAlignment(Plugin[FedCMEOptions]):
    """mu * L2Loss pulls local features towards global features (Eqs. 9, 10)."""

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor] | None:
        """Send the global features, once they exist."""
        if "features" not in server.state:
            return None
        return {"features": server.state["features"], "known": server.state["known"]}

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Start the sums of Eq. 5."""
        classes, device = client.num_classes, client.device
        client.scratch["sums"] = torch.zeros(classes, client.model.feature_dim, dtype=torch.float64, device=device)
        client.scratch["counts"] = torch.zeros(classes, dtype=torch.int64, device=device)

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Add mu * L2Loss (Eqs. 9, 10). Before the first global features there is no such term."""
        received = step.client.received
        if not received:
            return None
        mean = self.options.distance == "mean"
        known = received["features"], received["known"]
        distance = partial(eq.alignment_loss, step.features, step.y, *known, mean=mean)
        return Loss(distance, weight=self.options.mu, name="alignment")

    @hookimpl
    def observe(self, step: Step) -> None:
        """Add the batch's features to the sums of Eq. 5 (Algorithm 2 line 12)."""
        sums, counts = class_sums(step.features, step.y, step.client.num_classes)
        step.client.scratch["sums"].add_(sums)
        step.client.scratch["counts"].add_(counts)

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send the local features (Eq. 5)."""
        features, held = eq.local_features(client.scratch["sums"], client.scratch["counts"])
        return {"features": features.float(), "held": held}

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add the client's features to the sums of Eq. 6."""
        state, classes = server.state, server.num_classes
        expected = {"features": ((classes, server.feature_dim), None), "held": ((classes,), torch.bool)}
        check_tensors(update.payload, expected)
        features, held = update.payload["features"].cpu().double(), update.payload["held"].cpu()  # (C, d), (C,)
        check_means("features", features[held], self.options.narrowed())
        state.add("sums", torch.where(held.unsqueeze(1), features, 0.0))
        state["holders"] = state.get("holders", 0) + held

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Update the global features (Eq. 6). The model itself is averaged as in FedAvg."""
        state = server.state
        sums, holders = state.pop("sums"), state.pop("holders")
        memory, known = state.get("features", torch.zeros_like(sums)), state.get("known", torch.zeros_like(holders) > 0)
        features, known = eq.global_features(sums, holders, len(server.accepted), memory, known)
        state["features"], state["known"] = features.float(), known


class FedCME(Plugin[FedCMEOptions]):
    """FedCME (Nie, Xiao, Yang, Wu, 2023, arXiv 2307.08574).

    Clients that differ most are matched, and swap classifiers in the middle of local training (section IV-A). mu *
    L2Loss pulls local features towards global features (Eqs. 9, 10).
    """

    neutral = {"mu": 0.0, "exchange": "none"}
    assumes = ("one-model", "classes")

    def __init__(self, options: FedCMEOptions) -> None:
        super().__init__(options)
        exchanging, aligning = options.exchange != "none", options.align and options.mu > 0
        exchange = (LayerExchange(options),) if exchanging else ()
        self.parts = (*exchange, FeatureAlignment(options)) if aligning else exchange

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Move the split between feature extractor and classifier ("the final linear layers", Appendix)."""
        move_split(model, self.options.classifier_layers, option="fedcme.classifier_layers")
        if self.options.classifier_layers > 1:
            task.reshape_classifier(self.name)
