"""FedNTD as a fedcore plugin."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedcore import Loss, Plugin, PluginOptions, RunSetup, Step, hookimpl

__all__ = ["FedNTD", "FedNTDOptions", "not_true_distillation", "not_true_log_probabilities"]


class FedNTDOptions(PluginOptions):
    """Options of FedNTD."""

    beta: float = Field(default=1.0, ge=0, description="beta: weight of the distillation; 0 is FedAvg.")
    temperature: float = Field(default=1.0, gt=0, description="tau: temperature of the not-true softmax.")


class FedNTD(Plugin[FedNTDOptions]):
    """FedNTD (Lee, Jeong, Shin, Bae, Yun, NeurIPS 2022, arXiv 2106.03097): CE + beta * L_NTD.

    L_NTD holds the local model's distribution over the classes that are not the sample's own near the global model's,
    so that what the client has no samples of is not forgotten.
    """

    neutral = {"beta": 0.0}
    assumes = ("classes",)
    reads = ("global",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Tell of two classes."""
        if setup.task.num_classes == 2:
            setup.note(self.name, "of two classes one is not the sample's own, so the term is 0 and has no effect")

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add L_NTD between the model in training and the one received."""
        return Loss(
            lambda: not_true_distillation(step.logits, step.frozen("global").logits, step.y, self.options.temperature),
            weight=self.options.beta,
            name="not_true",
        )


def not_true_log_probabilities(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return log q~(c), q~(c) = exp(z_c / tau) / sum_{c' != y} exp(z_c' / tau) for c != y, and 0 in place of c = y.

    ``logits`` z (B, C), ``labels`` y (B,); the result is (B, C).
    """
    true = labels.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)  # (B, C)
    others = (logits / temperature).masked_fill(true, -torch.inf)
    return others.log_softmax(dim=1).masked_fill(true, 0.0)


def not_true_distillation(local: Tensor, received: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return L_NTD, the batch's mean of sum_{c != y} q~_g(c) log(q~_g(c) / q~_l(c)), shape ().

    ``local`` and ``received`` are the two models' logits (B, C), ``labels`` y (B,).

    >>> local, received = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[-5.0, 0.0, 0.0]])
    >>> not_true_distillation(local, received, torch.tensor([0]))  # the true class has no part in it
    tensor(0.)
    """
    learned, held = (not_true_log_probabilities(z, labels, temperature) for z in (local, received))
    return F.kl_div(learned, held, reduction="batchmean", log_target=True)
