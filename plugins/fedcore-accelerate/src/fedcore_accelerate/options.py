"""The options that this package adds to a run. Imports no torch: every command reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from fedcore import Section, Trait

if TYPE_CHECKING:
    from fedcore import RunConfig
    from fedcore.client import Setup
    from fedcore.data import Dataset

MOST_STACKED = 1024


class Acceleration(Section):
    """How the steps of trainings are taken: recorded, side by side, or as one computation."""

    panel = "Execution"
    tries = ({"stack": 3},)

    autotune: bool = Field(
        default=False,
        description="At the start, measure which memory format is faster on this machine, and record the choice.",
    )
    capture: bool = Field(default=True, description="On CUDA, record training steps as graphs and replay them.")
    lanes: Annotated[int, Trait.NO_EFFECT, Trait.CHANGEABLE] = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of clients that train side by side on CUDA without worker processes. Their steps are"
        " branches of one captured graph.",
    )
    stack: Annotated[int, Field(ge=1, le=MOST_STACKED)] | Literal["auto"] = Field(
        default=1,
        description="Number of clients that train as one computation, for small models. Results differ by rounding."
        " auto chooses it at the start.",
    )

    @field_validator("stack", mode="wrap")
    @classmethod
    def _check_stack(cls, value: Any, accept: Any) -> Any:
        """Say one thing of a value that is neither a number within bounds nor ``auto``; pydantic says one of each."""
        try:
            return accept(value)
        except ValidationError:
            fits = f"a whole number from 1 to {MOST_STACKED}, or auto"
            raise ValueError(f"input should be {fits} (given: {value!r:.200})") from None

    @model_validator(mode="after")
    def _check_side_by_side(self) -> Self:
        limits = (name for name in ("client_timeout", "max_waiting") if getattr(self, name, None) is not None)
        if self.stack_size > 1 and (limit := next(limits, None)):
            raise ValueError(f"stack trains clients together, but {limit} is about single clients; leave one out")
        if self.stack_size > 1 and self.lanes > 1:
            raise ValueError("stack and lanes are two ways to train clients side by side; leave one out")
        return self

    @property
    def stack_size(self) -> int:
        """Number of clients that train as one computation; 1 while ``auto`` is not replaced."""
        return 1 if self.stack == "auto" else self.stack

    def settled(self, setup: Setup, dataset: Dataset) -> Mapping[str, Any]:
        """Return the memory format that ``autotune`` chooses, and the stack that ``auto`` stands for."""
        if not self.autotune and self.stack != "auto":
            return {}
        from fedcore_accelerate.tuning import fastest_format, usual_stack

        settled: dict[str, Any] = {}
        if self.stack == "auto":
            settled["stack"] = usual_stack(setup) if self.lanes == 1 else 1
        if self.autotune:
            settled["memory_format"] = fastest_format(setup, dataset)
        return settled

    def cautions(self, setup: Setup) -> list[str]:
        """Return the cautions about lanes and stacks without effect."""
        if self.lanes == 1 and self.stack_size == 1:
            return []
        from fedcore_accelerate.tuning import lacks_lanes, why_unstacked

        cautions = []
        if self.lanes > 1 and lacks_lanes(setup, capture=self.capture):
            why = "on the CPU, with worker processes, with --no-capture, or with hooks on parameters' gradients"
            cautions.append(f"--lanes {self.lanes} has no effect {why}")
        if self.stack_size > 1 and (reason := why_unstacked(setup)):
            cautions.append(f"--stack {self.stack} has no effect: {reason}")
        return cautions


def options_of(config: RunConfig) -> Acceleration:
    """Return a configuration as what it also is: the options of this package."""
    assert isinstance(config, Acceleration)
    return config
