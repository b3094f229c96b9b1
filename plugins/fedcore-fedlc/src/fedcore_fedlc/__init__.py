"""FedLC as a fedcore plugin."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedcore import ClientContext, Plugin, PluginOptions, Step, hookimpl

__all__ = ["FedLC", "FedLCOptions", "calibrated_cross_entropy", "margins"]


class FedLCOptions(PluginOptions):
    """Options of FedLC."""

    tau: float = Field(default=1.0, ge=0, le=1e6, description="tau: strength of the calibration; 0 is FedAvg.")
    least: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Samples that a class counts at least; 0: classes without any leave the softmax.",
    )


class FedLC(Plugin[FedLCOptions]):
    """FedLC (Zhang, Li, Li, Xu, Wu, Ding, Wu, ICML 2022, arXiv 2209.00189): calibrated cross-entropy.

    In client k's training the logit of class c is lowered by tau n_c^{-1/4}, most where the client has few samples;
    classes that it does not have leave the softmax, or count ``least`` samples. Evaluation uses the logits as they are.
    """

    neutral = {"tau": 0.0}
    assumes = ("classes",)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix the margins from the labels of the client's whole training part."""
        if self.options.tau > 0:
            client.scratch["margins"] = margins(client.class_counts.clamp(min=self.options.least), self.options.tau)

    @hookimpl
    def task_loss(self, step: Step) -> Tensor | None:
        """Replace cross-entropy by that of the calibrated logits."""
        if self.options.tau == 0:
            return None
        return calibrated_cross_entropy(step.logits, step.y, step.client.scratch["margins"])


def margins(counts: Tensor, tau: float) -> Tensor:
    """Return tau n_c^{-1/4}, infinite where the client has no sample of class c.

    ``counts`` n (C,) integer samples per class, ``tau`` > 0; the result is (C,) float32.

    >>> import torch
    >>> margins(torch.tensor([16, 1, 0]), 2.0)
    tensor([1., 2., inf])
    """
    return (tau * counts.double().pow(-0.25)).float()


def calibrated_cross_entropy(logits: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
    """Return the mean of -log(exp(f_y - m_y) / sum_c exp(f_c - m_c)), shape ().

    ``logits`` f (B, C), ``labels`` y (B,), ``margins`` m (C,). A class with an infinite margin has probability and
    gradient 0; it must not be a label.
    """
    return F.cross_entropy(logits - margins, labels)
