"""The FedCP plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from fedcore import ClientContext, ClientUpdate, Loss, ModelTask, Plugin, PluginOptions, SplitModel, Step, hookimpl
from fedcore_fedcp.equations import maximum_mean_discrepancy, mixed_head
from fedcore_fedcp.head import ConditionalHead

HEAD, PERSONAL = "classifier.head.", "classifier.personal."


class FedCPOptions(PluginOptions):
    """Options of FedCP."""

    lambda_: float = Field(
        default=1.0,
        ge=0,
        alias="lambda",
        description="Weight lambda of the MMD between local and global features; 0: none.",
    )


class FedCP(Plugin[FedCPOptions]):
    """FedCP, conditional policies (Zhang et al., KDD 2023, arXiv 2307.01217): CE + lambda * MMD(h, f_g(x)).

    A policy network splits each sample's features between the client's own head and the frozen global one, given
    the sample and the client's context. Encoder, policy network and the mean of both heads are aggregated.
    """

    def __init__(self, options: FedCPOptions) -> None:
        super().__init__(options)
        self.reads = ("global",) if options.lambda_ > 0 else ()

    # --- both sides ----------------------------------------------------------------------------------------

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Put the policy network and a second head, equal to the first, on the features."""
        task.reshape_classifier(self.name)
        with task.random("policy"):
            model.classifier = ConditionalHead(model.classifier, model.feature_dim)

    @hookimpl
    def personal_parameters(self, model: SplitModel) -> Sequence[str]:
        """Keep P_i and the context on the client."""
        return [PERSONAL + "*", "classifier.context"]

    # --- on a client ---------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Freeze H_g as received."""
        client.freeze([HEAD + "*"])

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add lambda * MMD(h, f_g(x)), which keeps local features near the global encoder's."""
        return Loss(
            lambda: maximum_mean_discrepancy(step.features, step.frozen("global").features),
            weight=self.options.lambda_,
            name="mmd",
        )

    @hookimpl
    def end_local(self, client: ClientContext) -> None:
        """Take the context of the trained P_i, for the next participation and for evaluation."""
        head = client.model.classifier
        assert isinstance(head, ConditionalHead)
        head.renew_context()

    @hookimpl
    def pre_upload(self, client: ClientContext, update: ClientUpdate) -> ClientUpdate:
        """Send 0.5 P_i + 0.5 H_g in place of H_g."""
        head = client.model.classifier
        assert isinstance(head, ConditionalHead)
        mixed = {
            HEAD + name: mixed_head(own.detach(), update.model[HEAD + name])
            for name, own in head.personal.named_parameters()
        }
        return replace(update, model={**update.model, **mixed})
