"""FedNH as a fedcore plugin: a classifier of class prototypes on the sphere, uniform at first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import (
    ClientContext,
    ClientUpdate,
    ConfigError,
    ModelTask,
    Plugin,
    PluginOptions,
    RunSetup,
    ServerContext,
    SplitModel,
    Tensors,
    hookimpl,
)
from fedcore_functional import (
    UnitLength,
    add_prototypes,
    check_prototypes,
    class_prototypes,
    mean_over_holders,
    refuse_changed_counts,
)

__all__ = [
    "FedNH",
    "FedNHOptions",
    "PrototypeClassifier",
    "directions",
    "smoothed_prototypes",
    "uniform_prototypes",
]

PROTOTYPES = "classifier.weight"


class FedNHOptions(PluginOptions):
    """Options of FedNH."""

    rho: float = Field(
        default=0.9, ge=0, le=1, description="rho: how much of a prototype stays in a round; 1 keeps the uniform ones."
    )
    scale: float = Field(default=20.0, gt=0, le=1e4, description="s: factor of the cosines, at the start if learned.")
    learn_scale: bool = Field(default=True, description="Train and average s with the encoder, or keep it as it is.")


class FedNH(Plugin[FedNHOptions]):
    """FedNH, non-parametric head (Dai, Chen, Li, Heinecke, Sun, Xu, AAAI 2023, arXiv 2212.02758).

    The classifier's rows are prototypes W of length 1, and logits are s times their cosines with the features. Clients
    train the encoder with W fixed. The server moves W slowly towards the means of the clients' features.
    """

    owns = (PROTOTYPES,)
    assumes = ("classes",)

    # --- both sides ----------------------------------------------------------------------------------------

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Scale the features to unit length, and make uniform prototypes the classifier."""
        task.reshape_classifier(self.name)
        if model.feature_dim < task.num_classes:
            width = f"the features are {model.feature_dim} wide, and the data set has {task.num_classes} classes"
            raise ConfigError(f"fednh: {width}; use a --model or a projection head that is as wide")
        model.encoder.add_module("unit", UnitLength())
        with task.random("prototypes"):
            prototypes = uniform_prototypes(task.num_classes, model.feature_dim)
        model.classifier = PrototypeClassifier(prototypes, self.options.scale, self.options.learn_scale)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse changed counts: they weigh the prototypes."""
        refuse_changed_counts(setup, self.name)

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Keep W as it was received."""
        client.freeze([PROTOTYPES])

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors:
        """Send mu_{k,c}, the directions of the class means of the trained model's features, with the class counts."""
        features, _, labels = client.forward()
        sent = class_prototypes(features, labels, client.num_classes, weights="samples")
        return {**sent, "prototypes": directions(sent["prototypes"])}

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add n_{k,c} mu_{k,c} and n_{k,c} to the round's sums."""
        width, samples = server.feature_dim, update.samples
        check_prototypes(update.payload, server.num_classes, width, weights="samples", samples=samples)
        server.state.update(add_prototypes(server.state, update.payload))
        update.payload.clear()

    @hookimpl
    def aggregate(self, server: ServerContext) -> Mapping[str, Tensor]:
        """Return W of the next round."""
        means, before = mean_over_holders(server.state), server.model[PROTOTYPES]
        moved = smoothed_prototypes(before, means["prototypes"], means["known"], self.options.rho)
        return {PROTOTYPES: moved.to(before.dtype)}

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Drop the round's sums."""
        del server.state["sums"], server.state["weights"]


class PrototypeClassifier(nn.Module):
    """The logits s w_c^T z of features z (B, d) of unit length.

    :param prototypes: W (C, d), rows of length 1.
    :param learn: whether s is trained.
    """

    def __init__(self, prototypes: Tensor, scale: float, learn: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(prototypes)
        self.scale = nn.Parameter(torch.tensor(scale)) if learn else scale

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, C)."""
        logits: Tensor = self.scale * F.linear(features, self.weight)
        return logits


def uniform_prototypes(num_classes: int, width: int) -> Tensor:
    """Return orthonormal rows W (C, d) from torch's random stream, C at most d.

    >>> w = uniform_prototypes(2, 3)
    >>> torch.allclose(w @ w.T, torch.eye(2), atol=1e-6)
    True
    """
    prototypes: Tensor = nn.init.orthogonal_(torch.empty(num_classes, width))
    return prototypes


def directions(means: Tensor) -> Tensor:
    """Return mu_{k,c}: the class means (C, d) divided by their lengths. A zero row stays zero.

    >>> directions(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    of_length_1: Tensor = UnitLength()(means)
    return of_length_1


def smoothed_prototypes(prototypes: Tensor, means: Tensor, known: Tensor, rho: float) -> Tensor:
    """Return w_c <- u(rho w_c + (1 - rho) u(sum_k n_{k,c} mu_{k,c} / sum_k n_{k,c})), u(v) = v divided by its length.

    ``prototypes`` w (C, d) of length 1, ``means`` (C, d) of the mu_{k,c}, ``known`` (C,) bool. A class that no client
    of the round holds keeps its prototype.

    >>> smoothed_prototypes(torch.eye(2), torch.tensor([[0.0, 5.0], [9.0, 9.0]]), torch.tensor([True, False]), 0.5)
    tensor([[0.7071, 0.7071],
            [0.0000, 1.0000]])
    """
    moved = F.normalize(rho * prototypes + (1 - rho) * F.normalize(means, dim=1), dim=1)
    return torch.where(known.unsqueeze(1), moved, prototypes)
