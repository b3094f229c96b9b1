"""The FDCL plugin: which line of the paper's Algorithm 2 is computed where."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Loss, ModelTask, Plugin, PluginOptions, RunSetup, SplitModel, Step, hookimpl
from fedcore.models import Outputs
from fedcore_fdcl.equations import classifier_loss, encoder_loss
from fedcore_functional import move_split


class FDCLOptions(PluginOptions):
    """Options of FDCL; the defaults are the paper's."""

    mu: float = Field(default=0.1, ge=0, description="mu of line 10: weight of L_e + L_c. 0 trains as FedAvg.")
    temperature: float = Field(default=0.5, gt=0, description="tau of lines 8 and 9.")
    head_layers: int = Field(default=1, ge=1, description="Linear layers that form the classifier M_c (Fig. 7).")
    encoder_term: bool = Field(default=True, description="L_e on features (line 8; Table 5).")
    classifier_term: bool = Field(default=True, description="L_c on the classifier's outputs (line 9; Table 5).")
    previous: Literal["participation", "epoch"] = Field(
        default="participation",
        description="p of lines 6 and 7: the client's model after its last participation, or after its previous epoch.",
    )
    outputs: Literal["logits", "probabilities"] = Field(
        default="probabilities",
        description="P_c of lines 7 and 9: the softmax of the classifier's logits, or the logits.",
    )


class Buffers(Plugin[FDCLOptions]):
    """Keeps the buffers as the previous epoch left them, for ``previous=epoch``.

    The first batch of an epoch renews BatchNorm's statistics before any hook sees it.
    """

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Keep copies of the buffers that the model is saved with."""
        parameters = {name for name, _ in client.model.named_parameters()}
        state = client.model.state_dict()
        client.scratch["buffers"] = {n: tensor.clone() for n, tensor in state.items() if n not in parameters}

    @hookimpl
    def observe(self, step: Step) -> None:
        """Renew the copies."""
        for name, kept in step.client.scratch["buffers"].items():
            kept.copy_(step.model.get_buffer(name))


class FDCL(Plugin[FDCLOptions]):
    """FDCL (Liu, Fang, Electronics 14(11) 2256, 2025): CE + mu * (L_e + L_c) (Algorithm 2, line 10).

    L_e pulls features towards the global model's and away from the client's own previous one's. L_c pulls the
    classifier's outputs the other way. The client's personal model is that of its last participation, whatever
    ``previous`` is.
    """

    neutral = {"mu": 0.0}
    assumes = ("classes",)
    reads = ("global", "previous")

    def __init__(self, options: FDCLOptions) -> None:
        super().__init__(options)
        self.parts = (Buffers(options),) if options.previous == "epoch" else ()

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Move the split between encoder and classifier (section 4.2)."""
        move_split(model, self.options.head_layers, option="fdcl.head_layers")
        if self.options.head_layers > 1:
            task.reshape_classifier(self.name)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Tell of a model that stays on the clients, and of layers that clients exchange before an epoch."""
        trained = setup.layout.trainable
        for epoch, names in setup.breaks.items() if self.options.previous == "epoch" else ():
            had = f"{names[0]!r} exchanges layers at the start of local epoch {epoch + 1}"
            setup.note(
                self.name, f"{had}: the previous model has the received ones in this epoch, not the client's own"
            )
        if self.options.previous == "participation" and trained <= setup.layout.personal:
            reason = f"{setup.keeper_of(trained)!r} keeps the model on the clients: their previous one is the global"
            setup.note(self.name, f"{reason} one, and both terms are constant; previous=epoch has terms")

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss]:
        """Return mu * (L_e + L_c), or no term without a previous model."""
        options, previous = self.options, cache(lambda: self._previous(step))

        def encoder() -> Tensor | None:
            if (far := previous()) is None:
                return None
            near = step.frozen("global")
            return encoder_loss(step.features, near.features, far.features, temperature=options.temperature)

        def classifier() -> Tensor | None:
            if (far := previous()) is None:
                return None
            outputs = [step.logits, step.frozen("global").logits, far.logits]
            if options.outputs == "probabilities":
                outputs = [logits.softmax(dim=1) for logits in outputs]
            return classifier_loss(*outputs, temperature=options.temperature)

        return [
            Loss(encoder, weight=options.mu * options.encoder_term, name="encoder"),
            Loss(classifier, weight=options.mu * options.classifier_term, name="classifier"),
        ]

    def _previous(self, step: Step) -> Outputs | None:
        """Return the outputs of p on the batch; None in a first participation or a first epoch, which have no p."""
        if self.options.previous == "participation":
            return step.frozen("previous")
        if step.epoch == 0:  # starts from the global model: with p = g both terms are constant
            return None
        scratch = step.client.scratch
        if scratch.get("epoch") != step.epoch:  # the first batch: the weights are still those of the previous epoch
            scratch.update(epoch=step.epoch, previous=step.client.network(scratch["buffers"]))
        with torch.no_grad():
            return Outputs(*scratch["previous"](step.x))

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | None:
        """Evaluate the client's own model as its last participation left it."""
        return client.previous_model
