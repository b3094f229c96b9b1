"""RunConfig: everything that determines a run, in sections. Each field has bounds and a description.

The command line is generated from this class. A field's name is its flag, and its description is the help text.
Functions take the section that they read, and callers pass the whole configuration, which is each of its sections.
Imports no torch, so that ``fedcore --help`` is quick.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, new_class
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedcore.base import registry
from fedcore.base.errors import ConfigError, FedcoreError, PluginContractError, UnknownNameError, describe
from fedcore.base.protocols import EVALUATED
from fedcore.base.section import CHANGEABLE, EVERYDAY, LABEL, NO_EFFECT, PARTITION, Kind, Section, Trait

_MANY = 1_000_000_000  # the bound of all counts; larger is surely a typo

_LABEL = re.compile(r"\w[\w.+=-]*")
_MANY_TAGS, _LONG_LABEL = 50, 50

Json = Any  # None, bool, int, float, str, list or dict of the same


def _split(value: Any) -> Any:
    """Accept ``A,"B, C"`` as well as a list. None is empty: a line of a file that says ``client_models:``."""
    if isinstance(value, str):
        return [quoted or plain for quoted, plain in re.findall(r'\s*"([^"]*)"\s*,|([^,]*),', f"{value},")]
    return [] if value is None else value


def _unseen_of(value: Any) -> Any:
    """Return the share of the unseen clients, or their names: ``A,B`` as well as a list. A lone 0 may be either."""
    share = public_share(text := str(value))
    if share is not None and 0 <= share < 1 and text.strip("0"):
        return share
    names = [value] if type(value) is int else _split(value[:-1] if text.endswith(",") else value)
    if not text.strip("0") or not isinstance(names, list) or len({*map(str, names)}) < len(names):
        raise ValueError("write a share from 0.0 to below 1, or each client's name or number once ('0,' is client 0)")
    return [*map(str, names)] or 0.0


def read_choices(value: Any, kind: str) -> dict[str, dict[str, Json]]:
    """Return ``[moon, {uscc: {epochs: 5}}]`` as ``{moon: {}, uscc: {epochs: 5}}``. None is empty.

    :param kind: ``plugin``, ``tracker`` or ``engine``, for messages.
    :raises ConfigError: a name is not a text or is listed twice, or options are not a mapping.
    """
    listed = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    pairs: list[tuple[Any, Any]] = []
    for item in listed:
        pairs += item.items() if isinstance(item, dict) else [(item, None)]
    names = [name for name, _ in pairs]
    for name, options in pairs:
        _refuse_objects([name], f"{kind}s")
        if not isinstance(name, str) or not isinstance(options, (dict, NoneType)):
            raise ConfigError(f"{kind}s: write names, such as [moon, uscc], or a mapping of names to options")
        if names.count(name) > 1:
            raise ConfigError(f"{kind} {name!r} is listed {names.count(name)} times; list it once")
    return {name: dict(options or {}) for name, options in pairs}


def _refuse_objects(values: Iterable[Any], field: str) -> None:
    """Refuse classes and functions: a file has to be able to hold a configuration."""
    if any(callable(value) for value in values):
        raise ConfigError(f"a configuration holds names; give objects to fedcore.run(config, {field}=...)")


def _choices(value: Any, info: ValidationInfo) -> Any:
    return read_choices(value, str(info.field_name).removesuffix("s"))


def _names_only(value: Any, info: ValidationInfo) -> Any:
    _refuse_objects(value if isinstance(value, (list, tuple)) else [value], str(info.field_name))
    return value


def _at_home(path: Path | None) -> Path | None:
    """Read ``~`` as the home: a shell leaves it in ``--out=~/run``, and a file or a program has no shell."""
    return path and Path(os.path.expanduser(path))


def _from_anywhere(path: Path | None) -> Path | None:
    """Make a path absolute: the run may be resumed from another folder."""
    return path and path.absolute()


Choices = Annotated[dict[str, dict[str, Json]], BeforeValidator(_choices)]
Name = Annotated[str, BeforeValidator(_names_only)]
UserPath = Annotated[Path | None, AfterValidator(_at_home)]
Count = Annotated[int, Field(ge=1, le=_MANY)]
CountOrNone = Annotated[int | None, Field(ge=1, le=_MANY)]
Part = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class MethodOptions(Section):
    """The methods of a run."""

    panel = "Methods"

    plugins: Annotated[Choices, Kind("plugin"), EVERYDAY] = Field(
        default_factory=dict,
        description="Methods with their options, in the order in which their hooks are called. Empty: FedAvg.",
    )


class DataOptions(Section):
    """The data set of a run."""

    panel = "Data and model"

    dataset: Annotated[Name, Kind("dataset"), PARTITION, EVERYDAY] = Field(
        default="digits", description="Data set: a name, npz:FILE or imagefolder:DIR."
    )
    data_dir: Annotated[UserPath, AfterValidator(_from_anywhere), NO_EFFECT, CHANGEABLE] = Field(
        default=None, description="Folder that holds the data sets' files."
    )
    task: Annotated[Name, Kind("task"), PARTITION] = Field(
        default="auto",
        description="What the labels are, such as regression. auto: as the data set says, else as they look, else"
        " classes.",
    )
    augment: bool = Field(
        default=False, description="Change training samples at random by the data set's augmentation, for CIFAR MOON's."
    )


class ModelOptions(Section):
    """The network of a run, or the networks of its clients."""

    panel = "Data and model"

    model: Annotated[Name, Kind("model"), EVERYDAY] = Field(
        default="auto", description="Model: a name, torchvision:NAME or timm:NAME. auto is the data set's usual model."
    )
    client_models: Annotated[list[str], BeforeValidator(_split), Kind("model")] = Field(
        default_factory=list,
        description="Models of the clients, such as A,B,C, instead of --model: client k has the model k modulo their"
        " number. For methods in which the parts that differ stay on the clients.",
    )
    projection: bool = Field(default=False, description="Put a 2-layer projection head (256 wide) on the encoder.")

    def model_of(self, client: int) -> str:
        """Return the name of a client's model."""
        return self.client_models[client % len(self.client_models)] if self.client_models else self.model


class FederationOptions(Section):
    """The clients of a run: the samples that they hold, who takes part, and in which system."""

    panel = "Clients"

    partition: Annotated[str, Kind("partitioner"), PARTITION, EVERYDAY] = Field(
        default="dirichlet", description="Partitioner that assigns samples to clients, or a partition.json."
    )
    alpha: Annotated[float, PARTITION, EVERYDAY] = Field(
        default=0.5, gt=0, description="Dirichlet concentration. Smaller is more heterogeneous."
    )
    classes_per_client: Annotated[Count, PARTITION] = Field(
        default=2, description="Classes (or shards) per client, for the partitions classes and shards."
    )
    clients: Annotated[int, PARTITION, EVERYDAY] = Field(
        default=10, ge=1, le=100_000_000, description="Number of registered clients."
    )
    participation: Annotated[Share, EVERYDAY] = Field(
        default=1.0, description="Fraction of the clients sampled in each round."
    )
    client_test_fraction: Annotated[Part, PARTITION] = Field(
        default=0.0, description="Fraction of each client's samples held out for evaluation on the client."
    )
    validation_share: Part = Field(
        default=0.0,
        description="Share of each client's held-out samples that chooses the best round. The reported figures leave"
        " it out. 0: the reported samples choose.",
    )
    public: Annotated[str | None, Kind("dataset"), PARTITION] = Field(
        default=None,
        description="Public samples, which belong to no client, for methods that use them. Give a share of the training"
        " set, such as 0.1, or the name of another data set.",
    )
    unseen_clients: Annotated[Any, BeforeValidator(_unseen_of), PARTITION] = Field(
        default=0.0,
        description="Share of the clients that never train, or their names. They are evaluated on their held-out"
        " parts.",
    )
    adapt_epochs: int = Field(
        default=0,
        ge=0,
        le=_MANY,
        description="Local epochs after which the unseen clients are evaluated once more. 0: without adaptation.",
    )

    @field_validator("public", mode="before")
    @classmethod
    def _read_public(cls, value: Any) -> Any:
        value = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        share = public_share(value) if isinstance(value, str) else None
        if share is not None and not 0 < share < 1:
            raise ValueError("a share of the training set is above 0 and below 1")
        return value

    @model_validator(mode="after")
    def _check_unseen(self) -> Self:
        unseen = self.clients - self.training_clients
        if self.unseen_clients and not 0 < unseen < self.clients:
            raise ValueError(
                f"unseen_clients is {self.unseen_clients}, so {unseen} of {self.clients} clients would never train; "
                "at least one has to be unseen, and at least one has to train"
            )
        if self.adapt_epochs and not unseen:
            raise ValueError(
                "adapt_epochs is for clients that never train, but there are none; add --unseen-clients 0.2"
            )
        return self

    @property
    def training_clients(self) -> int:
        """Number of clients that can take part, without the unseen clients. They have the first ids."""
        unseen = self.unseen_clients
        return self.clients - (len(unseen) if isinstance(unseen, list) else round(unseen * self.clients))

    @property
    def cohort_size(self) -> int:
        """Number of clients sampled per round: participation * training_clients, rounded, at least one."""
        return max(1, round(self.participation * self.training_clients))


class TrainingOptions(Section):
    """What clients do in a round, and for how many rounds."""

    panel = "Training"

    rounds: Annotated[Count, CHANGEABLE, EVERYDAY] = Field(default=20, description="Communication rounds T.")
    local_epochs: Annotated[Count, EVERYDAY] = Field(default=5, description="Local epochs E per round.")
    local_steps: CountOrNone = Field(
        default=None, description="Optimizer steps K that every client takes per round, instead of local epochs."
    )
    batch_size: Count = Field(
        default=16, description="Samples per local mini-batch. The last one of an epoch may be smaller."
    )
    drop_last: bool = Field(
        default=False,
        description="Leave out a local epoch's last mini-batch if it is smaller than the others and not the only one.",
    )
    lr: Annotated[float, EVERYDAY] = Field(
        default=0.02, gt=0, description="Local learning rate, before decay and schedule."
    )
    lr_decay: Share = Field(default=1.0, description="Factor on the learning rate after every round.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        default="sgd", description="Optimizer of local training. Its state is reset in each round."
    )
    momentum: Part = Field(default=0.9, description="Momentum of local SGD.")
    beta1: Part = Field(default=0.9, description="Decay of Adam's first moment.")
    beta2: Part = Field(default=0.999, description="Decay of Adam's second moment.")
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the root of Adam's second moment.")
    weight_decay: float = Field(
        default=1e-5,
        ge=0,
        description="L2 penalty on every trainable parameter. With adamw: decay of the weights per step.",
    )
    clip_norm: float | None = Field(default=None, gt=0, description="Maximum norm of a local gradient. Off by default.")
    buffers: Literal["global", "local"] = Field(
        default="global",
        description="BatchNorm statistics and other buffers: averaged by samples, or kept on each client.",
    )
    seed: Annotated[int, EVERYDAY] = Field(
        default=0, ge=0, lt=2**63, description="Seed of all random streams of the run."
    )
    patience: Annotated[CountOrNone, CHANGEABLE] = Field(
        default=None,
        description="Stop after so many rounds that are not better on the clients' held-out parts. Default: off.",
    )

    @property
    def local_work(self) -> tuple[Literal["epochs", "steps"], int]:
        """A client's work per round: the unit and the amount."""
        return ("epochs", self.local_epochs) if self.local_steps is None else ("steps", self.local_steps)

    def work_of(self, meta: Mapping[str, Any]) -> tuple[Literal["epochs", "steps"], int]:
        """Return a client's work, a unit and an amount: the ``epochs`` or ``steps`` of its task, else all clients'."""
        unit, everybody = self.local_work
        return ("steps", meta["steps"]) if "steps" in meta else (unit, meta.get(unit, everybody))

    def smallest_batch(self, samples: int, needed: int = 1) -> int:
        """Return the smallest mini-batch that is trained in an epoch on a number of samples. Smaller ones are skipped.

        :param needed: the smallest mini-batch that the model can train on.
        """
        return max(needed, min(self.batch_size, samples)) if self.drop_last else needed

    def batches(self, samples: int, needed: int = 1) -> int:
        """Return the number of mini-batches that are trained in a local epoch on a number of samples."""
        full, rest = divmod(samples, self.batch_size)
        smallest = self.smallest_batch(samples, needed)
        return full * (self.batch_size >= smallest) + (rest >= smallest)

    def learning_rate(self, number: int) -> float:
        """Return the local learning rate of round t = ``number``, from 0: lr * lr_decay^t, as sections schedule it."""
        rate = self.lr * self.lr_decay**number
        for section in RunConfig.sections():
            rate = section.scheduled(self, rate, number)
        return rate


class ExecutionOptions(Section):
    """How and where a run is executed."""

    panel = "Execution"

    engine: Annotated[str, Kind("engine")] = Field(
        default="local", description="Engine that runs the clients: local, or the name of an installed engine."
    )
    engine_options: Annotated[dict[str, Json], NO_EFFECT] = Field(
        default_factory=dict, description="Options of the engine. On the command line: --set ENGINE.OPTION=VALUE."
    )
    workers: Annotated[int | None, NO_EFFECT, CHANGEABLE] = Field(
        default=None,
        ge=0,
        le=1024,
        description="Number of worker processes, one thread each. 0 trains in this process. Default: one per core; on "
        "CUDA, or without the package fedcore-workers, 0.",
    )
    device: Annotated[str, CHANGEABLE] = Field(
        default="auto", description="Device of training and evaluation: auto, cpu, cuda or cuda:N."
    )
    precision: Literal["float32", "tf32", "bf16"] = Field(
        default="float32", description="Arithmetic of forward and backward passes. Weights and state stay float32."
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        default="auto",
        description="Layout of images and convolutions in memory. auto is a fixed rule per device and model.",
    )
    min_clients: int = Field(
        default=1,
        ge=0,
        description="Minimum number of accepted updates per round. With fewer, the run stops. 0 allows empty rounds.",
    )
    max_waiting: Annotated[int | None, NO_EFFECT] = Field(
        default=None, ge=1, description="Maximum number of updates that wait for an earlier one before dispatch pauses."
    )
    max_payload: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Maximum upload per plugin and client, in MiB. Default: 16 times the model, at least 64.",
    )
    client_timeout: Annotated[float | None, NO_EFFECT, CHANGEABLE] = Field(
        default=None,
        gt=0,
        le=1e6,  # a longer wait is refused by the kernel
        description="Seconds after which a client without an answer counts as failed and its worker is replaced. Not"
        " with --workers 0. Off by default.",
    )


class RecordOptions(Section):
    """What is measured, kept and shown of a run."""

    panel = "Records"

    eval_every: int = Field(
        default=1, ge=1, description="Rounds between evaluations. The last round is always evaluated."
    )
    metrics: Annotated[list[str], BeforeValidator(_names_only), Kind("metric"), NO_EFFECT, CHANGEABLE] = Field(
        default_factory=list, description="Metrics of an evaluation next to accuracy and loss."
    )
    protocols: Annotated[list[str], NO_EFFECT] = Field(
        default_factory=list, description="Protocols that the run measures, of those that apply. Default: all."
    )
    keep: Annotated[Literal["last", "best"], NO_EFFECT] = Field(
        default="last", description="best: also keep the global model of the best round on the clients' held-out parts."
    )
    best_by: str = Field(
        default="accuracy",
        description="Figure by which --patience, --keep best and searches choose: accuracy, loss, mean or worst10 of"
        " the clients, or a --metric.",
    )
    checkpoint_every: Annotated[int | None, NO_EFFECT] = Field(
        default=None, ge=1, description="Rounds between checkpoints. Default: one, or as many as take a second."
    )
    out: Annotated[UserPath, NO_EFFECT, EVERYDAY] = Field(
        default=None, description="Run directory. Default: runs/<time>-<plugins>, with a name runs/<time>-<name>."
    )
    name: Annotated[str | None, LABEL] = Field(
        default=None, description="Name of the run: letters, digits and . _ + = -"
    )
    tags: Annotated[list[str], LABEL] = Field(
        default_factory=list, max_length=_MANY_TAGS, description="Words by which fedcore runs list finds the run."
    )
    note: Annotated[str | None, LABEL] = Field(default=None, max_length=2000, description="A remark about the run.")
    trackers: Annotated[Choices, Kind("tracker"), NO_EFFECT] = Field(
        default_factory=dict, description="Trackers that show the run while it trains, each with its options."
    )

    @field_validator("tags", "metrics", "protocols", mode="before")
    @classmethod
    def _read_list(cls, value: Any) -> Any:
        """Accept one name as well as a list, and None as no name. A name that is given twice counts once."""
        value = [value] if isinstance(value, str) else [] if value is None else value
        is_list = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
        return list(dict.fromkeys(value)) if is_list else value

    @field_validator("protocols")
    @classmethod
    def _known_protocols(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in EVALUATED:
                raise UnknownNameError("protocol", name, EVALUATED)
        return value

    @field_validator("name", "tags")
    @classmethod
    def _check_labels(cls, value: str | list[str] | None, info: ValidationInfo) -> Any:
        """Refuse a label that is not one word: labels stand in tables, on the command line and in folders' names."""
        for text in [value] if isinstance(value, str) else value or ():
            if not _LABEL.fullmatch(text) or len(text) > _LONG_LABEL:
                raise ValueError(
                    f"a {str(info.field_name).removesuffix('s')} has 1 to {_LONG_LABEL} letters, digits and . _ + = -, "
                    f"and begins with a letter or digit; {text!r:.80} is none. Sentences go into a note"
                )
        return value


class RunConfig(
    RecordOptions, ExecutionOptions, TrainingOptions, FederationOptions, ModelOptions, DataOptions, MethodOptions
):
    """One federated run. Flags override a config file, and the file overrides these defaults.

    The help and config.yaml show the sections from the last base class to the first, as Python collects fields.
    """

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name in self.trackers:
            if name in self.plugins:
                raise ValueError(f"{name!r} is both a plugin and a tracker of this run; remove one of them")
        if self.min_clients > self.cohort_size:
            raise ValueError(
                f"min_clients is {self.min_clients}, but a round samples only {self.cohort_size} of "
                f"{self.training_clients} clients (participation {self.participation}); lower min_clients or "
                "raise participation"
            )
        return self

    @classmethod
    def create(cls, values: dict[str, Any], *, source: str = "", typed: Collection[str] = ()) -> Self:
        """Return the configuration of a mapping. One message reports all problems.

        :param source: the file of the values, for messages.
        :param typed: the fields with values from the command line instead of the file.
        :raises ConfigError: names each field, its value and its bound.
        """
        try:
            return cls.model_validate(values, context=source)
        except ValidationError as error:
            raise ConfigError(describe(error, f"{source}: " if source else "", typed=typed)) from None

    @classmethod
    @cache
    def sections(cls) -> tuple[type[Section], ...]:
        """Return the sections, those of packages first."""
        return tuple(part for part in cls.__mro__ if issubclass(part, Section) and "panel" in vars(part))

    def names(self) -> list[str]:
        """Return the names of objects in the configuration, in the order of the fields."""
        values = [getattr(self, option) for option in type(self).model_fields if marked(option, Kind)]
        return [name for value in values for name in ([value] if isinstance(value, str) else value or ())]

    def written(self) -> dict[str, Any]:
        """Return the options as config.yaml holds them, as plain values.

        An option of a package is left out at its default, so that the run can be read without the package.
        """
        values = self.model_dump(mode="json")
        return {name: value for name, value in values.items() if name in _OWN} | self.of_packages()

    def of_packages(self, *traits: Trait) -> dict[str, Any]:
        """Return the options of packages that are not at their defaults, as plain values; with one of some traits."""
        fields = {name: field for name, field in type(self).model_fields.items() if name not in _OWN}
        values = self.model_dump(mode="json", include={*fields})
        return {
            name: values[name]
            for name, field in fields.items()
            if values[name] != field.get_default(call_default_factory=True)
            and (not traits or {*traits} & {*field.metadata})
        }


_OWN = {*RunConfig.model_fields}
"""The options of fedcore itself."""


def _with_options_of_packages(config: type[RunConfig]) -> type[RunConfig]:
    """Return a configuration that has the sections of installed packages, too.

    Every option has an entry point of the group ``fedcore.options``, which names its section. What cannot be imported,
    or would replace something that is there, is left out with a warning: it must not stop other runs.
    """
    bases: list[type[Section]] = [config]
    for name in registry.available("option"):
        try:
            section = registry.resolve("option", name)
            if not (isinstance(section, type) and issubclass(section, Section) and name in section.model_fields):
                raise PluginContractError.of(name, "is not a field of a fedcore.Section", kind="option")
            if any(issubclass(base, section) for base in bases):
                continue
            names = {each for each in [*vars(section), *section.model_fields] if not each.startswith("__")}
            names -= {*dir(Section), "panel"}
            if taken := {each for each in names for base in bases if each in base.model_fields or hasattr(base, each)}:
                raise PluginContractError.of(name, f"has a section with {min(taken)!r}, a name in use", kind="option")
        except FedcoreError as error:
            warnings.warn(f"{error}; the option is left out", RuntimeWarning, stacklevel=2)
            continue
        bases.insert(0, section)
    attributes = {name: getattr(config, name) for name in ("__module__", "__qualname__", "__doc__")}
    # One class: pydantic takes milliseconds for each.
    extended = new_class(config.__name__, (*bases,), exec_body=lambda body: body.update(attributes))
    return extended if len(bases) > 1 else config


if not TYPE_CHECKING:
    RunConfig = _with_options_of_packages(RunConfig)


def marked(option: str, mark: type[str]) -> str:
    """Return the :class:`Kind` of an option, or its form if it is :class:`Repeated`; empty without this mark."""
    return next((item for item in RunConfig.model_fields[option].metadata if isinstance(item, mark)), "")


def options_with(*traits: Trait) -> tuple[str, ...]:
    """Return the options of a run that have one of some traits."""
    return tuple(name for name, field in RunConfig.model_fields.items() if {*traits} & {*field.metadata})


def public_share(public: str | None) -> float | None:
    """Return the share of the training set that ``--public`` names; None if it names a data set or is not given.

    >>> public_share("0.1"), public_share("digits")
    (0.1, None)
    """
    try:
        return float(public or "")
    except ValueError:
        return None
