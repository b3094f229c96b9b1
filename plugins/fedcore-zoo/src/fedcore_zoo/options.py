"""The options that this package adds to a run. Imports no torch: every command reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedcore import Section, Trait
from fedcore.tools import Kind, flag_of

if TYPE_CHECKING:
    from fedcore import SplitModel
    from fedcore.client import Setup
    from fedcore.data import Dataset, IntArray, Partition


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
        """Return the file's name with the start of its digest, which binds the run to its content.

        :raises ConfigError: a SplitModel that a program made cannot be trained as it is evaluated.
        """
        from fedcore_zoo.split_network import check_split_model

        check_split_model(setup, dataset)
        if self.weights is None:
            return {}
        from fedcore_zoo.weights import with_digest

        return {"weights": with_digest(self.weights)}

    def cautions(self, setup: Setup) -> list[str]:
        """Return the cautions about tensors of the file without a place, fresh heads, and objects of the network."""
        from fedcore_zoo.kept import kept_objects
        from fedcore_zoo.weights import unused_head, weights_cautions

        of_file = [] if self.weights is None else weights_cautions(setup, self.weights)
        return [*of_file, *unused_head(setup), *kept_objects(setup)]


class Normalize(Section):
    """The normalisation of a run's samples."""

    panel = "Data and model"

    normalize: Literal["as-loaded", "global", "client", "none", "pretrained"] = Field(
        default="as-loaded",
        description="Mean and deviation that samples are normalised by: as the data set does, of all clients' training"
        " samples, of each client's own, none, or those of the network's pretrained weights.",
    )

    def prepared(self, dataset: Dataset, partition: Partition) -> Dataset:
        """Return the data set, normalised by the training samples of the clients."""
        from fedcore_zoo.preparation import prepare

        return prepare(self, self.normalize, dataset, partition)


class Augmented(Section):
    """The augmentation of a run's training samples."""

    panel = "Data and model"

    if TYPE_CHECKING:
        augment: bool

    augmentation: Annotated[str | None, Kind("augmentation")] = Field(
        default=None,
        description="Augmentation instead of the data set's own: torchvision:RandomHorizontalFlip,RandomRotation=15 or"
        " module:... Switches --augment on.",
    )

    @model_validator(mode="before")
    @classmethod
    def _augment(cls, values: Any) -> Any:
        named = isinstance(values, dict) and values.get("augmentation") is not None
        return {"augment": True, **values} if named else values

    def prepared(self, dataset: Dataset, partition: Partition) -> Dataset:
        """Return the data set with this augmentation."""
        from dataclasses import replace

        chosen = dataset if self.augmentation is None else replace(dataset, augmentation=self.augmentation)
        if self.augment and chosen.augmentation and chosen.task.grid:
            from fedcore_zoo.transforms import masks_stay

            return masks_stay(chosen)
        return chosen


class Divided(Section):
    """Which training samples of a data set are divided among the clients."""

    panel = "Clients"

    if TYPE_CHECKING:
        public: str | None = None
        """The option of the core, which a run has, too."""

    samples: Annotated[int | None, Trait.PARTITION] = Field(
        default=None,
        ge=1,
        description="Number of training samples to assign, drawn in proportion to the classes. Default: all.",
    )
    imbalance: Annotated[float, Trait.PARTITION] = Field(
        default=1.0,
        ge=1,
        le=1_000_000_000,
        description="Long tail of the training set: how many times as many samples the first class has as the last. 1:"
        " as it is.",
    )
    unseen_domain: Annotated[str | None, Trait.PARTITION] = Field(
        default=None,
        description="Domain that no client holds, of a data set with domains. The global model is evaluated"
        " on it separately.",
    )

    def divided(self, dataset: Dataset, rows: IntArray) -> IntArray:
        """Return the positions of the samples that these options leave."""
        from fedcore_zoo.divided import divided

        return divided(
            dataset,
            rows,
            samples=self.samples,
            imbalance=self.imbalance,
            unseen_domain=self.unseen_domain,
            public=self.public,
            seed=self.seed,
        )


class Norm(Section):
    """The normalisation layers of a run's networks."""

    panel = "Data and model"

    norm: Literal["as-built", "group"] = Field(
        default="as-built",
        description="group: GroupNorm in place of each BatchNorm of the network, whose statistics depend on a client's"
        " batches.",
    )

    def built(self, model: SplitModel) -> None:
        """Put GroupNorm in the place of BatchNorm."""
        if self.norm == "group":
            from fedcore_zoo.group_norm import with_group_norm

            with_group_norm(model)

    def cautions(self, setup: Setup) -> list[str]:
        """Return that the option has no effect on a network without BatchNorm."""
        if self.norm == "group":
            from fedcore_zoo.group_norm import has_group_norm

            if not has_group_norm(setup.model):
                return [f"--norm group has no effect: model {setup.config.model!r} has no BatchNorm"]
        return []


class Schedule(Section):
    """The learning rate over the rounds."""

    panel = "Training"

    if TYPE_CHECKING:
        rounds: int

    lr_schedule: Literal["constant", "cosine", "step"] = Field(
        default="constant",
        description="Schedule of the learning rate over the rounds: constant, half a cosine down to 0, or steps down.",
    )
    lr_step_rounds: int = Field(
        default=10, ge=1, le=1_000_000_000, description="Rounds between two steps of --lr-schedule step."
    )
    lr_step_factor: float = Field(default=0.1, gt=0, le=1, description="Factor of each step of --lr-schedule step.")
    warmup_rounds: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        description="Number of first rounds in which the learning rate rises linearly to its full value.",
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_rounds >= self.rounds:
            raise ValueError(f"warmup_rounds is {self.warmup_rounds}, but the run has {self.rounds} rounds")
        return self

    def scheduled(self, rate: float, number: int) -> float:
        """Return the learning rate of round t = ``number`` of T rounds with a warm-up of W rounds.

        It is the rate, times the schedule, times the warm-up:

        - ``cosine``: (1 + cos(pi * s / S)) / 2 with s = max(0, t - W) and S = T - W;
        - ``step``: lr_step_factor^floor(t / lr_step_rounds);
        - in the warm-up, t < W: (t + 1) / (W + 1).
        """
        warmup = self.warmup_rounds
        if self.lr_schedule == "cosine":
            rate *= (1 + math.cos(math.pi * max(0, number - warmup) / (self.rounds - warmup))) / 2
        elif self.lr_schedule == "step":
            rate *= self.lr_step_factor ** (number // self.lr_step_rounds)
        return rate * (number + 1) / (warmup + 1) if number < warmup else rate

    def cautions(self, setup: Setup) -> list[str]:
        """Return the cautions about steps next to another schedule."""
        fields = Schedule.model_fields
        steps = {"lr_step_rounds": self.lr_step_rounds, "lr_step_factor": self.lr_step_factor}
        return [
            f"{flag_of(option)} {value} has no effect with --lr-schedule {self.lr_schedule}"
            for option, value in steps.items()
            if self.lr_schedule != "step" and value != fields[option].default
        ]
