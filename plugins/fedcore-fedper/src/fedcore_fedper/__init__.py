"""FedPer as a fedcore plugin."""

from __future__ import annotations

from pydantic import Field, field_validator

from fedcore import Plugin, PluginOptions, SplitModel, hookimpl
from fedcore_functional import check_layers, names_of_last_layers

__all__ = ["FedPer", "FedPerOptions"]


class FedPerOptions(PluginOptions):
    """Options of FedPer."""

    personal: int | list[str] = Field(
        default=1,
        description="K_P >= 0, the number of personalization layers, counted from the output (section 3); or patterns "
        "over the model's names, such as [classifier.*]. 0 is FedAvg.",
    )

    _check_personal = field_validator("personal")(check_layers)


class FedPer(Plugin[FedPerOptions]):
    """FedPer (Arivazhagan, Aggarwal, Singh, Choudhary, 2019, arXiv 1912.00818).

    Base and personalization layers are trained together by SGD (FEDPER-CLIENT); the base alone is sent, and averaged
    by samples (FEDPER-SERVER). Client j's model is (W_B, W_{P_j}).
    """

    neutral = {"personal": 0}

    @hookimpl
    def personal_parameters(self, model: SplitModel) -> list[str]:
        """Keep W_P on each client: its last K_P layers, or the parameters that the patterns name."""
        personal = self.options.personal
        if isinstance(personal, list):
            return personal
        return names_of_last_layers(model, personal, option="fedper.personal")
