"""FedETF as a fedcore plugin: a fixed classifier of simplex geometry, balanced features."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcore import (
    ClientContext,
    ConfigError,
    ModelTask,
    Plugin,
    PluginConflictError,
    PluginOptions,
    RunSetup,
    SplitModel,
    Step,
    hookimpl,
)
from fedcore_functional import UnitLength, balanced_cross_entropy, log_prior

__all__ = ["FedETF", "FedETFOptions", "SimplexClassifier", "simplex_etf"]


class FedETFOptions(PluginOptions):
    """Options of FedETF."""

    width: int | None = Field(
        default=None,
        ge=2,
        le=1_000_000,
        description="Width of the projected features, at least the number of classes; default the features' width, or "
        "the number of classes if that is larger.",
    )
    beta: float = Field(default=10.0, gt=0, le=1e4, description="Initial value of the learnable temperature beta.")
    gamma: float = Field(
        default=1.0, ge=0, le=100, description="Exponent gamma of the client's class counts; 0 is cross-entropy."
    )
    least: int = Field(
        default=1,
        ge=0,
        le=10**9,
        description="Samples that a class counts at least; 0: classes without any leave the softmax.",
    )


class FedETF(Plugin[FedETFOptions]):
    """FedETF (Li, Shang, He, Lin, Wu, ICCV 2023, arXiv 2303.10058), its first stage: the global model.

    All clients share a classifier V that is never trained: its class vectors form a simplex equiangular tight frame. A
    linear projection and the scaling to unit length bring the features onto its sphere. Clients train encoder,
    projection and temperature by the balanced feature loss.
    """

    assumes = ("classes",)

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Add the projection g and put the fixed classifier V on it."""
        task.reshape_classifier(self.name)
        width = self.options.width or max(model.feature_dim, task.num_classes)
        if width < task.num_classes:
            raise ConfigError(f"fedetf.width is {width}, but the data set has {task.num_classes} classes; give as many")
        with task.random("etf-projection"):
            projection = nn.Linear(model.feature_dim, width)
        model.encoder.add_module("etf", nn.Sequential(projection, UnitLength()))
        with task.random("etf"):
            vectors = simplex_etf(task.num_classes, width)
        model.classifier = SimplexClassifier(vectors, self.options.beta)
        model.feature_dim = width

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse a plugin that corrects the classifier (CCVR, USCC) or combines the clients' own ones (FedPAC)."""
        for other in setup.plugins:
            corrected = setup.claimed(other, "corrects")
            combined = setup.layout.personal.intersection(setup.claimed(other, "starts", personal=True))
            for does, names in (("corrects", corrected), ("combines", combined)):
                if any(name.startswith("classifier.") for name in names):
                    reason = f"{other.name!r} {does} the classifier, but the class vectors of {self.name!r} are fixed"
                    raise PluginConflictError.of(self.name, other.name, reason)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix gamma log n_c from the labels of the client's whole training part."""
        client.scratch["prior"] = log_prior(client.class_counts.clamp(min=self.options.least), self.options.gamma)

    @hookimpl
    def task_loss(self, step: Step) -> Tensor:
        """Replace cross-entropy by the balanced feature loss."""
        return balanced_cross_entropy(step.logits, step.y, step.client.scratch["prior"])


class SimplexClassifier(nn.Module):
    """The logits beta v_c^T mu of features mu (B, d) of unit length. V is fixed, beta is trained.

    :param vectors: V (d, C), as :func:`simplex_etf` returns it.
    """

    def __init__(self, vectors: Tensor, beta: float) -> None:
        super().__init__()
        self.vectors = nn.Parameter(vectors, requires_grad=False)
        self.beta = nn.Parameter(torch.tensor(beta))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, C)."""
        logits: Tensor = self.beta * (features @ self.vectors)
        return logits


def simplex_etf(num_classes: int, width: int) -> Tensor:
    """Return V = sqrt(C / (C - 1)) U (I - 1 1^T / C), (d, C) float32, from torch's random stream.

    U (d, C) has orthonormal columns. So each class vector has length 1, and any two have the cosine -1 / (C - 1).
    There is no U if d is less than C.

    >>> v = simplex_etf(3, 5)
    >>> [round(x, 4) for x in (v.T @ v)[0].tolist()]
    [1.0, -0.5, -0.5]
    """
    basis, _ = torch.linalg.qr(torch.randn(width, num_classes, dtype=torch.float64))  # U
    centred = torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes
    vectors: Tensor = math.sqrt(num_classes / (num_classes - 1)) * basis @ centred
    return vectors.float()
