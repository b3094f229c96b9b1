"""The FDCL plugin: which line of the paper's Algorithm 2 is computed where."""

from __future__ import annotations

from pydantic import Field

from fedcore import ClientContext, Loss, Plugin, PluginOptions, SplitModel, Step, hookimpl
from fedcore.models import move_split
from fedcore_fdcl.equations import classifier_loss, encoder_loss


class FDCLOptions(PluginOptions):
    """Options of FDCL; the defaults are the paper's."""

    mu: float = Field(default=0.1, ge=0, description="mu of line 10: weight of L_e + L_c; 0 trains as FedAvg.")
    temperature: float = Field(default=0.5, gt=0, description="tau of lines 8 and 9.")
    head_layers: int = Field(default=1, ge=1, description="Linear layers that form the classifier M_c (Fig. 7).")
    encoder_term: bool = Field(default=True, description="L_e on features (line 8; Table 5).")
    classifier_term: bool = Field(default=True, description="L_c on logits (line 9; Table 5).")


class FDCL(Plugin[FDCLOptions]):
    """FDCL (Liu, Fang, Electronics 14(11) 2256, 2025): CE + mu * (L_e + L_c) (Algorithm 2, line 10).

    Features are drawn towards the global model and away from the client's own previous one; logits the other way
    round. The client's personal model is the one of its last participation.
    """

    neutral = {"mu": 0.0}
    reads = ("global", "previous")

    def __init__(self, options: FDCLOptions) -> None:
        super().__init__(options)
        self.reshapes = ("classifier.*",) if options.head_layers > 1 else ()

    @hookimpl
    def configure_model(self, model: SplitModel) -> None:
        """Move the split between encoder and classifier (section 4.2)."""
        move_split(model, self.options.head_layers, option="fdcl.head_layers")

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss] | None:
        """Add mu * (L_e + L_c); a client's first participation has no previous model, and neither term."""
        options = self.options
        if options.mu == 0:
            return None
        received, previous = step.frozen("global"), step.frozen("previous")
        if received is None or previous is None:
            return None
        losses, tau = [], options.temperature
        if options.encoder_term:
            value = encoder_loss(step.features, received.features, previous.features, temperature=tau)
            losses.append(Loss(value, weight=options.mu, name="encoder"))
        if options.classifier_term:
            value = classifier_loss(step.logits, received.logits, previous.logits, temperature=tau)
            losses.append(Loss(value, weight=options.mu, name="classifier"))
        return losses

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | None:
        """Evaluate the client's own model as its last participation left it."""
        return client.previous_model
