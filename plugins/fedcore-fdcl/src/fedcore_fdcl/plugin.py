"""The FDCL plugin: which line of the paper's Algorithm 2 is computed where."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from fedcore import ClientContext, Loss, ModelTask, Plugin, PluginOptions, SplitModel, Step, hookimpl
from fedcore.models import Outputs, move_split
from fedcore_fdcl.equations import classifier_loss, encoder_loss


class FDCLOptions(PluginOptions):
    """Options of FDCL; the defaults are the paper's."""

    mu: float = Field(default=0.1, ge=0, description="mu of line 10: weight of L_e + L_c; 0 trains as FedAvg.")
    temperature: float = Field(default=0.5, gt=0, description="tau of lines 8 and 9.")
    head_layers: int = Field(default=1, ge=1, description="Linear layers that form the classifier M_c (Fig. 7).")
    encoder_term: bool = Field(default=True, description="L_e on features (line 8; Table 5).")
    classifier_term: bool = Field(default=True, description="L_c on the classifier's outputs (line 9; Table 5).")
    previous: Literal["participation", "epoch"] = Field(
        default="participation",
        description="p of lines 6 and 7: the model of the client's last participation, or of its previous local epoch.",
    )
    outputs: Literal["logits", "probabilities"] = Field(
        default="logits", description="P_c of lines 7 and 9: the classifier's logits, or their softmax."
    )


class FDCL(Plugin[FDCLOptions]):
    """FDCL (Liu, Fang, Electronics 14(11) 2256, 2025): CE + mu * (L_e + L_c) (Algorithm 2, line 10).

    Features are drawn towards the global model and away from the client's own previous one; logits the other way
    round. The client's personal model is the one of its last participation, whatever ``previous`` says.
    """

    neutral = {"mu": 0.0}
    reads = ("global", "previous")

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Move the split between encoder and classifier (section 4.2)."""
        move_split(model, self.options.head_layers, option="fdcl.head_layers")
        if self.options.head_layers > 1:
            task.reshape_classifier(self.name)

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss] | None:
        """Add mu * (L_e + L_c); without a previous model there is neither term."""
        options = self.options
        if options.mu == 0:
            return None
        received, previous = step.frozen("global"), self._previous(step)
        if received is None or previous is None:
            return None
        losses, tau = [], options.temperature
        if options.encoder_term:
            value = encoder_loss(step.features, received.features, previous.features, temperature=tau)
            losses.append(Loss(value, weight=options.mu, name="encoder"))
        if options.classifier_term:
            outputs = [step.logits, received.logits, previous.logits]
            if options.outputs == "probabilities":
                outputs = [logits.softmax(dim=1) for logits in outputs]
            value = classifier_loss(*outputs, temperature=tau)
            losses.append(Loss(value, weight=options.mu, name="classifier"))
        return losses

    def _previous(self, step: Step) -> Outputs | None:
        """Return the outputs of p; None where there is none, in a first participation or a first epoch."""
        if self.options.previous == "participation":
            return step.frozen("previous")
        if step.epoch == 0:  # it starts from the global model: with p = g both terms are constant
            return None
        scratch = step.client.scratch
        if scratch.get("epoch") != step.epoch:  # the first batch: the model is as the epoch before left it
            scratch.update(epoch=step.epoch, previous=step.client.network())
        with torch.no_grad():
            return Outputs(*scratch["previous"](step.x))

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | None:
        """Evaluate the client's own model as its last participation left it."""
        return client.previous_model
