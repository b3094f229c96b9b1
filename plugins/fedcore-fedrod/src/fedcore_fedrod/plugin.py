"""The FedRoD plugin."""

from __future__ import annotations

from contextlib import nullcontext

from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedcore import ClientContext, Loss, Plugin, PluginOptions, Step, hookimpl
from fedcore_fedrod.equations import TwoHeads, personal_cross_entropy
from fedcore_functional import balanced_cross_entropy, log_prior, may_draw


class FedRoDOptions(PluginOptions):
    """Options of FedRoD."""

    gamma: float = Field(
        default=1.0,
        ge=0,
        le=1e6,
        description="gamma: exponent of the label counts in the generic head's balanced softmax; 0 is cross-entropy.",
    )
    least: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Samples that a class counts at least; 0: classes without any leave the generic head's softmax.",
    )


class FedRoD(Plugin[FedRoDOptions]):
    """FedRoD (Chen, Chao, ICLR 2022, arXiv 2107.00778): two losses, two predictors.

    Features and generic head g are trained by balanced softmax, and averaged. Client m's personal head h_m is trained
    by the cross-entropy of g + h_m, whose gradient reaches h_m alone. h_m never leaves the client. The generic
    predictor is g, the personalised one g + h_m.
    """

    neutral = {"gamma": 0.0}  # the personal head changes nothing in the global model
    assumes = ("classes",)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix the label counts; take h_m up where the last participation left it. It starts as the received head."""
        if self.options.gamma > 0:
            counts = client.class_counts.clamp(min=self.options.least)
            client.scratch["prior"] = log_prior(counts, self.options.gamma)
        head = client.model.classifier
        client.scratch["draws"] = may_draw(head)
        client.add_parameters({name: client.state.get(name, w.detach()) for name, w in head.named_parameters()})

    @hookimpl
    def task_loss(self, step: Step) -> Tensor | None:
        """Train features and generic head by balanced softmax."""
        if self.options.gamma == 0:
            return None
        return balanced_cross_entropy(step.logits, step.y, step.client.scratch["prior"])

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Train h_m by the cross-entropy of g + h_m."""
        head = step.model.classifier
        # The second pass must neither move the head's buffers nor draw the random numbers of its dropout.
        tensors = {**dict(step.added), **{name: buffer.clone() for name, buffer in head.named_buffers()}}
        with step.random("personal") if step.client.scratch["draws"] else nullcontext():
            personal = functional_call(head, tensors, (step.features.detach(),))
        return Loss(personal_cross_entropy(step.logits, personal, step.y), name="personal")

    @hookimpl
    def end_local(self, client: ClientContext) -> None:
        """Keep h_m on the client."""
        client.state.update(client.added)

    @hookimpl
    def personal_model(self, client: ClientContext) -> TwoHeads | None:
        """Predict by g + h_m, on the averaged features; by g before the client's first participation."""
        if not client.state:
            return None
        own = client.network({f"classifier.{name}": tensor for name, tensor in client.state.items()})
        return TwoHeads(client.model, own.classifier)
