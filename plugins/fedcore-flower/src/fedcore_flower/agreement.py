"""The description of a run that a server sends to a client, and what the client checks before it takes part.

A client does not trust the server. It validates the configuration again and refuses code that the configuration names.
Methods must be installed at the client in the server's versions, and the client must allow them. The client's data,
states and device are its own.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import DECLARED, Dataset, ResidentSamples, Task, TensorSamples, as_dataset
from fedcore.tools import LABELS, RECORDED, code_in, installed_versions, registry
from fedcore_flower import wire
from fedcore_flower.conditions import TrainerOptions

RunId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""The id of a run. A client names a folder by it, so it must not contain a path."""

LOCAL_OPTIONS = (
    *(
        "data_dir",
        "out",
        "weights",
        "workers",
        "autotune",
        "capture",
        "lanes",
        "stack",
        "device",
        "engine_options",
        "trackers",
        "system",
    ),
    *LABELS,
)
"""The options that the server does not send and a client ignores.

At a client they have their defaults. Only the device is the client's own.
"""

INSTRUCTIONS = "instruction set"
"""The name, among the versions, of the instruction set with which torch computes on the CPU."""

SAFE_PREFIXES = ("torchvision", "timm")
"""The prefixes of models that read no files of the client."""


class Setup(BaseModel):
    """The description of a run for one client."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    run: RunId
    client: int = Field(ge=0)
    """The client's number."""
    clients: int = Field(ge=1, le=1 << 20)
    """The number of clients."""
    name: str = Field(max_length=64)
    """The client's name at the server."""
    config: dict[str, Any]
    """The run's configuration, without the local options."""
    kind: str
    """The kind of the samples."""
    num_classes: int = Field(ge=1, le=1 << 24)
    input_shape: list[int]
    task: str
    """The task's name in the group ``fedcore.tasks``."""
    form: dict[str, Any]
    """What the server's task keeps of its training labels, such as the mean by which targets are standardised."""
    class_names: list[str] | None
    """The names by which a client numbers its classes: the server's, or those on which the clients agree."""
    columns: list[str]
    """The names of the columns of the server's table in order. Empty if they are not known."""
    normalisation: list[list[float]] | None
    """The mean and standard deviation by which the server normalises each channel of its images, or each column of its
    table. None if it does not normalise.
    """
    recipe: dict[str, Any] = {}
    """How the server's table became numbers, if mean and deviation do not say it: categories, empty cells."""
    versions: dict[str, str]
    """The server's versions, as :func:`versions_of` returns them."""


def describe_run(
    config: RunConfig, dataset: Dataset, *, run: str, client: int, name: str, versions: Mapping[str, str]
) -> bytes:
    """Return the description of a run for one client, as a blob."""
    values, test = config.model_dump(mode="json", exclude=set(LOCAL_OPTIONS)), dataset.test
    normalisation, columns = None, list(test.columns) if isinstance(test, TensorSamples) else []
    if isinstance(test, (ResidentSamples, TensorSamples)) and test.mean:
        normalisation = [list(test.mean), list(test.std)]
    setup = Setup(
        run=run,
        client=client,
        clients=config.clients,
        name=name,
        config=values,
        kind=dataset.kind,
        num_classes=dataset.num_classes,
        task=dataset.task.name if config.task == "auto" else config.task,
        form=dict(dataset.task.form),
        input_shape=list(dataset.input_shape),
        class_names=list(dataset.class_names) if dataset.class_names else None,
        columns=columns,
        normalisation=normalisation,
        recipe=getattr(test, "recipe", {}),
        versions=dict(versions),
    )
    return wire.pack("setup", {}, setup=setup.model_dump(mode="json"))


def versions_of(config: RunConfig) -> dict[str, str]:
    """Return the versions that a run's bits depend on, and the CPU's instruction set.

    The packages are those of ``RECORDED``, fedcore, the packages of the run's methods and models, and the fedcore
    packages that these require.
    """
    models = {config.model, *config.client_models}
    parts = [("plugin", name) for name in config.plugins] + [("model", name) for name in models]
    parts += [("model prefix", name.partition(":")[0]) for name in models]
    needed = {"fedcore", *RECORDED}
    for kind, name in parts:
        point = registry.available(kind).get(name)
        if point is not None and point.dist is not None:
            required = [text for text in point.dist.requires or () if "extra ==" not in text]
            needed |= {point.dist.name, *(re.split(r"[^\w-]", text)[0] for text in required)}
    return {
        "python": platform.python_version(),
        INSTRUCTIONS: torch.backends.cpu.get_cpu_capability(),
        **{name: version for name, version in installed_versions().items() if name in needed},
    }


def read_setup(header: Mapping[str, Any]) -> Setup:
    """Decode a description of :func:`describe_run`.

    :raises ConfigError: a field is missing, unknown or not valid.
    """
    try:
        return Setup.model_validate(header.get("setup"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the server's description of the run is not valid: {where}: {first['msg']}") from None


def own_config(setup: Setup, options: TrainerOptions, dataset: str, tell: Callable[[str], None]) -> RunConfig:
    """Return the run's configuration for this client.

    :param options: the conditions under which this client takes part.
    :param dataset: the name of this client's data in messages.
    :param tell: called with warnings for the user.
    :raises ConfigError: the configuration is not valid, or this client refuses a name or a version in it.
    """
    values = {key: value for key, value in setup.config.items() if key not in LOCAL_OPTIONS}
    values.update(dataset=dataset, partition=DECLARED, engine="local", workers=0, device=options.device)
    config = RunConfig.create(values, source="the server's configuration")
    if config.clients != setup.clients or setup.client >= setup.clients:
        raise ConfigError(
            f"the server calls this client number {setup.client} of {setup.clients}, but its run has {config.clients} "
            "clients, numbered from 0"
        )
    for name in code_in(config.model_copy(update={"dataset": "", "engine": "", "partition": ""})):
        raise ConfigError(f"the server names {name!r}, which imports code; a client only runs installed packages")
    for name in config.plugins:
        if options.allowed is not None and name not in ("fedavg", *options.allowed):
            allowed = ", ".join(sorted(options.allowed)) or "none"
            raise ConfigError(f"method {name!r} is not allowed at the client (--allow-plugin: {allowed})")
        registry.resolve("plugin", name)
    for name in {config.model, *config.client_models}:
        prefix, colon, _ = name.partition(":")
        if colon and prefix not in SAFE_PREFIXES and name not in options.models:
            raise ConfigError(f"model {name!r} may read files of the client; it is permitted by --allow-model {name}")
        registry.resolve("model", name)
    _check_versions(setup.versions, versions_of(config), tell)
    return config


def check_data(setup: Setup, dataset: Dataset) -> None:
    """Check that the run's model can train on this client's data.

    :raises ConfigError: the samples have another kind or shape, or more classes than the run.
    """
    if dataset.kind != setup.kind:
        raise ConfigError(f"the run's samples are of kind {setup.kind!r}, the client's of kind {dataset.kind!r}")
    if list(dataset.input_shape) != setup.input_shape:
        ours, theirs = tuple(dataset.input_shape), tuple(setup.input_shape)
        raise ConfigError(f"the run's samples have the shape {theirs}, the client's the shape {ours}")
    if dataset.num_classes > setup.num_classes:
        outputs = "classes" if dataset.task.classes else "outputs"
        raise ConfigError(f"the run has {setup.num_classes} {outputs}, the client's data {dataset.num_classes}")


def of_task(setup: Setup, dataset: Dataset) -> Dataset:
    """Return a client's data set with labels of the run's task.

    :raises ConfigError: the server's task is not valid.
    :raises DataError: the client's labels are of another task, which the message names, or of another shape.
    """
    kind: type[Task] = registry.resolve("task", setup.task)
    if kind is not type(dataset.task):
        dataset = as_dataset(dataset, dataset.name, setup.task)
    try:
        task = kind.of(setup.form)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the server's description of the run is not valid: form: {error!r}") from None
    if not task.classes:
        labels = dataset.train.labels[:1]
        try:
            task.loss(torch.zeros(len(labels), setup.num_classes, *task.grid), labels)
        except (ValueError, RuntimeError):
            raise DataError(
                f"each label of {dataset.name} has the shape {tuple(labels.shape[1:])}, which does not fit the run's "
                f"{setup.num_classes} outputs of the task {setup.task!r}: give the columns that the server's data have"
            ) from None
    return replace(dataset, task=task)


def _check_versions(theirs: Mapping[str, str], ours: Mapping[str, str], tell: Callable[[str], None]) -> None:
    for name, version in ours.items():
        expected = theirs.get(name)
        if expected == version:
            continue
        if name not in ("python", INSTRUCTIONS, *RECORDED):
            difference = (
                f"{name} {version} is installed at the client, and {expected or 'no such package'} at the server"
            )
            package = "fedcore-fl" if name == "fedcore" else name
            raise ConfigError(
                f"{difference}; install the same: pip install {package}{'==' + expected if expected else ''}"
            )
        if expected:
            tell(f"{name} is {version} here and {expected} at the server: results may differ in their last bits")
