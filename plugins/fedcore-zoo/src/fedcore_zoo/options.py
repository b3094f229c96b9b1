"""The option that this package adds to a run. Imports no torch: every command reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fedcore import Section

if TYPE_CHECKING:
    from fedcore import SplitModel
    from fedcore.client import Setup
    from fedcore.data import Dataset


class Weights(Section):
    """The weights that a run starts from."""

    panel = "Data and model"

    weights: str | None = Field(
        default=None,
        description="Start from the weights in this safetensors file. A classifier of another shape stays fresh.",
    )

    def built(self, model: SplitModel) -> None:
        """Copy the tensors of the file into the model."""
        if self.weights is not None:
            from fedcore_zoo.weights import load_weights, with_digest

            load_weights(model, with_digest(self.weights))

    def settled(self, setup: Setup, dataset: Dataset) -> Mapping[str, Any]:
        """Return the file's name with the start of its digest, which binds the run to its content."""
        if self.weights is None:
            return {}
        from fedcore_zoo.weights import with_digest

        return {"weights": with_digest(self.weights)}

    def cautions(self, setup: Setup) -> list[str]:
        """Return the cautions about tensors of the file without a place, and about heads not from it."""
        if self.weights is None:
            return []
        from fedcore_zoo.weights import weights_cautions

        return weights_cautions(setup, self.weights)
