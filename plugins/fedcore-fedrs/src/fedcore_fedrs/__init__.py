"""FedRS as a fedcore plugin."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedcore import ClientContext, Plugin, PluginOptions, Step, hookimpl

__all__ = ["FedRS", "FedRSOptions", "frequency_factors", "missing_factors", "restricted_cross_entropy"]


class FedRSOptions(PluginOptions):
    """Options of FedRS."""

    alpha: float = Field(default=0.5, ge=0, le=1, description="alpha of the restricted softmax; 1 is FedAvg.")
    restrict: Literal["missing", "frequency"] = Field(
        default="missing",
        description="Which logits are scaled: those of missing classes (the paper), or all by class frequency (the "
        "authors' code).",
    )


class FedRS(Plugin[FedRSOptions]):
    """FedRS (Li, Zhan, KDD 2021, doi 10.1145/3447548.3467254): cross-entropy of the restricted softmax.

    Client k scales class c's logit by alpha_c^k in training, which damps the updates of the classifier's weights for
    classes that it does not have. Evaluation uses the logits as they are.
    """

    neutral = {"alpha": 1.0}
    assumes = ("classes",)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix alpha_c^k from the labels of the client's whole training part."""
        factors = missing_factors if self.options.restrict == "missing" else frequency_factors
        client.scratch["factors"] = factors(client.class_counts, self.options.alpha)

    @hookimpl
    def task_loss(self, step: Step) -> Tensor | None:
        """Replace cross-entropy by that of the restricted softmax."""
        if self.options.alpha == 1:
            return None
        return restricted_cross_entropy(step.logits, step.y, step.client.scratch["factors"])


def missing_factors(counts: Tensor, alpha: float) -> Tensor:
    """Return alpha_c = 1 where the client has class c, else alpha (the paper's restricted softmax).

    ``counts`` (C,) integer samples per class; the result is (C,) float32.
    """
    return torch.where(counts > 0, 1.0, alpha).float()


def frequency_factors(counts: Tensor, alpha: float) -> Tensor:
    """Return alpha_c = alpha + (1 - alpha) * pi_c / max_c pi_c, pi the class frequencies (the authors' code).

    ``counts`` (C,) integer samples per class; the result is (C,) float32.
    """
    return (alpha + (1 - alpha) * counts.double() / counts.max().clamp(min=1)).float()


def restricted_cross_entropy(logits: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    """Return the mean cross-entropy of softmax(alpha_c * z_c); its gradient in z_c is alpha_c * (p_c - 1[c = y]).

    ``logits`` z (B, C), bias included, ``labels`` y (B,), ``factors`` alpha (C,); the result has shape ().
    """
    return F.cross_entropy(logits * factors, labels)
