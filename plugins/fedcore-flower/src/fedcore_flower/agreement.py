"""What a server tells a client of a run, and what the client checks before it takes part.

The server's word is not taken for it: the configuration is validated again, code that it names is refused, methods
have to be installed here in the server's versions and allowed by this client, and its data, states and device are the
client's own.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcore import ConfigError, RunConfig
from fedcore.base import registry
from fedcore.base.identity import LABELS
from fedcore.data import DECLARED, Dataset, ResidentSamples, TensorSamples
from fedcore.runs.provenance import INSTRUCTIONS, RECORDED, installed_versions
from fedcore.runs.saved import code_in
from fedcore_flower import wire

RUN_ID = re.compile(r"[0-9a-f]{32}")

OWN = (
    *("data_dir", "out", "weights", "workers", "lanes", "stack", "device", "engine_options", "trackers", "system"),
    *LABELS,
)
"""Options that are no business of the other side's: they keep their defaults there."""

READ_NOTHING = ("torchvision", "timm")
"""Prefixes of models that are made by their name alone."""


class Setup(BaseModel):
    """A run as its server describes it to one client.

    :param run: the run's id, the name of the client's folder of states.
    :param client: the client's number among ``clients``; ``name`` what the server calls it.
    :param versions: see :func:`versions_of`.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    run: str = Field(pattern=RUN_ID.pattern, min_length=32, max_length=32)
    client: int = Field(ge=0)
    clients: int = Field(ge=1, le=1 << 20)
    name: str = Field(max_length=64)
    config: dict[str, Any]
    kind: str
    num_classes: int = Field(ge=1, le=1 << 24)
    input_shape: list[int]
    class_names: list[str] | None
    normalisation: list[list[float]] | None
    """Mean and standard deviation by which the server normalises each channel of images, or column of a table; None if
    it has none.
    """
    versions: dict[str, str]


def describe_run(
    config: RunConfig, dataset: Dataset, *, run: str, client: int, name: str, versions: Mapping[str, str]
) -> bytes:
    """Return what a client is sent of a run, as a blob."""
    values, test = config.model_dump(mode="json", exclude=set(OWN)), dataset.test
    normalisation = None
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
        input_shape=list(dataset.input_shape),
        class_names=list(dataset.class_names) if dataset.class_names else None,
        normalisation=normalisation,
        versions=dict(versions),
    )
    return wire.pack("setup", {}, setup=setup.model_dump(mode="json"))


def versions_of(config: RunConfig) -> dict[str, str]:
    """Return the versions that a run's bits depend on, and the CPU's instruction set.

    The packages are those of ``RECORDED``, fedcore, those that provide the methods and models, and what these require
    of fedcore's.
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
    """Return what :func:`describe_run` wrote.

    :raises ConfigError: it is something else.
    """
    try:
        return Setup.model_validate(header.get("setup"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the server's description of the run is none: {where}: {first['msg']}") from None


def own_config(
    setup: Setup,
    *,
    allowed: Collection[str] | None,
    models: Collection[str],
    device: str,
    dataset: str,
    tell: Callable[[str], None],
) -> RunConfig:
    """Return the run's configuration as this client uses it.

    :param allowed: methods that this client takes part in; None: all that are installed.
    :param models: names of models that may read this machine's files.
    :param device: the client's own. ``dataset`` what its data is called in messages.
    :param tell: called with warnings for the user.
    :raises ConfigError: what this client does not do, by name, and what to do about it.
    """
    values = {key: value for key, value in setup.config.items() if key not in OWN}
    if "plugins" in values and not isinstance(values["plugins"], dict):
        raise ConfigError("the server's configuration has no mapping of plugins")
    values.update(dataset=dataset, partition=DECLARED, engine="local", workers=0, device=device)
    config = RunConfig.create(values, source="the server's configuration")
    if config.clients != setup.clients or setup.client >= setup.clients:
        raise ConfigError(f"the server numbers this client {setup.client} of {setup.clients}, its run has others")
    for name in code_in(config.model_copy(update={"dataset": "", "engine": "", "partition": ""})):
        raise ConfigError(f"the server names {name!r}, which is code to import; a client runs installed packages only")
    for name in config.plugins:
        if allowed is not None and name != "fedavg" and name not in allowed:
            given = ", ".join(sorted(allowed)) or "none"
            raise ConfigError(f"method {name!r} is not allowed here (--allow-plugin: {given})")
        registry.resolve("plugin", name)
    for name in {config.model, *config.client_models}:
        prefix, colon, _ = name.partition(":")
        if colon and prefix not in READ_NOTHING and name not in models:
            raise ConfigError(f"model {name!r} may read files here; --allow-model {name} lets it")
        registry.resolve("model", name)
    _check_versions(setup.versions, versions_of(config), tell)
    return config


def check_data(setup: Setup, dataset: Dataset) -> None:
    """Refuse data that the run's model does not take.

    :raises ConfigError: what differs.
    """
    if dataset.kind != setup.kind:
        raise ConfigError(f"the run is about {setup.kind!r}, the data here is {dataset.kind!r}")
    if list(dataset.input_shape) != setup.input_shape:
        raise ConfigError(
            f"the run's samples have the shape {tuple(setup.input_shape)}, those here {tuple(dataset.input_shape)}"
        )
    if dataset.num_classes > setup.num_classes:
        raise ConfigError(f"the run has {setup.num_classes} classes, the data here {dataset.num_classes}")


def class_order(setup: Setup, names: tuple[str, ...] | None) -> list[int] | None:
    """Return, for each class here, its number in the run; None where they are numbered alike.

    :raises ConfigError: a class here is none of the run's.
    """
    if names is None or setup.class_names is None or list(names) == setup.class_names[: len(names)]:
        return None
    number = {name: k for k, name in enumerate(setup.class_names)}
    for name in names:
        if name not in number:
            raise ConfigError(f"class {name!r} of the data here is none of the run's: {', '.join(setup.class_names)}")
    return [number[name] for name in names]


def run_folder(state: Path, run: str) -> Path:
    """Return where a client keeps its states of a run."""
    if not RUN_ID.fullmatch(run):
        raise ConfigError(f"{run[:40]!r} is no run's id")
    return state / "runs" / run


def _check_versions(theirs: Mapping[str, str], ours: Mapping[str, str], tell: Callable[[str], None]) -> None:
    for name, version in ours.items():
        expected = theirs.get(name)
        if expected == version:
            continue
        if name not in ("python", INSTRUCTIONS, *RECORDED):
            found = f"{name} {version} is installed here, the server has {expected or 'none'}"
            raise ConfigError(f"{found}; install the same: pip install {name}{'==' + expected if expected else ''}")
        if expected:
            tell(f"{name} is {version} here, {expected} at the server: results may differ in their last bits")
