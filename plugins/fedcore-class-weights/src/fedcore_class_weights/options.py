"""The option that this package adds to a run. Imports no torch: every command reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from fedcore import Section

NAME = "class-weights"


class ClassWeightsOptions(Section):
    """How much each class counts in the task loss."""

    panel = "Training"

    if TYPE_CHECKING:
        plugins: dict[str, dict[str, object]]

    class_weights: Literal["none", "balanced"] = Field(
        default="none",
        description="balanced: each class counts the same in the task loss, by the training samples of all clients.",
    )

    @model_validator(mode="after")
    def _with_plugin(self) -> Self:
        if self.class_weights == "balanced":
            self.plugins.setdefault(NAME, {})
        return self
