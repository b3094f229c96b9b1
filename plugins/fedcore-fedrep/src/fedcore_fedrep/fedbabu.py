"""The FedBABU plugin."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from fedcore import ClientContext, Plugin, PluginConflictError, PluginOptions, RunSetup, SplitModel, hookimpl
from fedcore_fedrep.fedrep import FedRep


class FedBABUOptions(PluginOptions):
    """Options of FedBABU."""

    epochs: int = Field(
        default=5, ge=0, le=10_000, description="Epochs by which a client fine-tunes the model that is evaluated."
    )
    part: Literal["model", "head", "body"] = Field(default="model", description="What is fine-tuned.")
    batch_size: int = Field(default=50, ge=1, le=1_000_000, description="Samples per mini-batch of the fine-tuning.")
    lr: float | None = Field(
        default=None, gt=0, description="Learning rate of the fine-tuning; default the last round's."
    )


class FedBABU(Plugin[FedBABUOptions]):
    """FedBABU, body aggregation and body update (Oh, Kim, Yun, ICLR 2022, arXiv 2106.06042).

    The head stays as it was initialized on all clients, and the body alone is trained and averaged. A client's own
    model is the global one, head and body, after some epochs of SGD on its training part.
    """

    assumes = ("cross-entropy",)  # a client's own model is tuned by it

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse a plugin by which the body is frozen, too, in some epochs: nothing would be left to train.

        Tell of a plugin that keeps the head alone on the clients, where it stays as it was.
        """
        for plugin in setup.plugins:
            if isinstance(plugin, FedRep):
                reason = f"{self.name!r} trains the body alone, but {plugin.name!r} freezes parts in some local epochs"
                raise PluginConflictError.of(self.name, plugin.name, reason)
        kept = setup.layout.trainable & setup.layout.personal
        if kept and all(name.startswith("classifier.") for name in kept):
            reason = f"{setup.keeper_of(kept)!r} keeps the classifier on the clients"
            setup.note(self.name, f"{reason}, where nobody trains it: the run is the same as without that plugin")

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Train the body alone."""
        client.freeze(("classifier.*",))

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel:
        """Fine-tune the global model on the client's training part."""
        options, own = self.options, client.network()
        prefix = {"model": "", "head": "classifier.", "body": "encoder."}[options.part]
        stream = client.generator("fine-tune")
        for _ in range(options.epochs):
            for positions in torch.randperm(client.n, generator=stream).split(options.batch_size):
                gradients = client.gradients(positions, own)
                with torch.no_grad():
                    for name, gradient in gradients.items():
                        if name.startswith(prefix):
                            own.get_parameter(name).sub_(gradient, alpha=options.lr or client.lr)
        return own
