"""Resolve a configuration before anything runs or is written: replace ``auto``, load data, split it, build models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcore.base import registry
from fedcore.base.config import ExecutionOptions, MethodOptions, RunConfig
from fedcore.base.errors import ConfigError
from fedcore.base.protocols import HELD_OUT, PROTOCOLS
from fedcore.client.setup import Setup, check_client_models
from fedcore.data import Dataset, Partition, load_dataset, load_partition
from fedcore.data.assign import Scenario, with_public
from fedcore.data.partition import check_partition, labels_sha256, plain_info
from fedcore.hooks.plugin import BUILTIN, parse_options
from fedcore.hooks.plugins import PluginSet
from fedcore.models.placement import resolve_device


def resolve_config(config: RunConfig, dataset: Dataset | None = None) -> tuple[RunConfig, Dataset]:
    """Replace ``auto`` and load the data. Names are checked before any long work.

    :param dataset: the configured data set, if it is loaded already.
    :returns: the configuration with all options of its plugins and engine, and the data set. What depends on the
        model, such as the memory format, stays ``auto``.
    :raises ConfigError: or a subclass. A name or option is unknown, or options cannot be combined.
    """
    plugins = PluginSet.create(config.plugins)
    engine_options = resolve_engine(config)
    device = resolve_device(config.device)
    if config.precision == "tf32" and device.type != "cuda":
        raise ConfigError("--precision tf32 needs a CUDA device; on a CPU use float32 or bf16")
    if config.client_models and config.model not in ("auto", config.client_models[0]):
        raise ConfigError(f"--client-models stands instead of --model; leave out --model {config.model}")
    for name in {config.model, *config.client_models} - {"auto"}:
        registry.resolve("model", name)
    if dataset is None:
        dataset = load_dataset(config.dataset, config.data_dir, config.task)
        dataset = with_public(dataset, config.public, config.seed, config.data_dir)
    if not len(dataset.test):
        raise ConfigError(f"data set {config.dataset!r} has no test samples, but every run is evaluated on some")
    _ = Scenario(config, dataset).rows  # a wrong domain is refused before any long work
    models = [usual_model(dataset) if name == "auto" else name for name in config.client_models or [config.model]]
    resolved: dict[str, Any] = {
        "plugins": plugin_options(config, plugins),
        "engine_options": engine_options,
        "model": models[0],
        "client_models": models if config.client_models else [],
        "device": str(device),
    }
    return config.model_copy(update=resolved), dataset


def resolve_engine(options: ExecutionOptions) -> dict[str, Any]:
    """Return the engine's options with their defaults. An engine declares them in its ``Options``.

    :raises ConfigError: or a subclass. The engine or an option is unknown, or a value is out of bounds.
    """
    engine = registry.resolve("engine", options.engine)
    if not hasattr(engine, "Options"):
        if options.engine_options:
            raise ConfigError(
                f"engine {options.engine!r} has no options, but {next(iter(options.engine_options))!r} is set for it"
            )
        return {}
    parsed = parse_options(options.engine, engine, options.engine_options, kind="engine")
    return parsed.model_dump(mode="json", by_alias=True)


def plugin_options(options: MethodOptions, plugins: PluginSet) -> dict[str, dict[str, Any]]:
    """Return the options of a configuration's plugins with their defaults, without the built-in plugin."""
    names = [name for name in options.plugins if name != BUILTIN]
    return {
        name: plugin.options.model_dump(mode="json", by_alias=True) for name, plugin in zip(names, plugins, strict=True)
    }


def usual_model(dataset: Dataset) -> str:
    """Return the model that ``--model auto`` stands for."""
    if dataset.model is not None:
        return dataset.model
    channels, height, _ = (*dataset.input_shape, 0, 0)[:3]
    if height < 16:
        return "mlp"
    return "fdcl-cnn" if channels == 1 else "simple-cnn"


def resolve_partition(options: RunConfig, dataset: Dataset, made: Partition | None = None) -> Partition:
    """Split the samples among the clients, or take the partition of a file or of the program.

    :param made: the program's partition instead of the configured one.
    """
    scenario = Scenario(options, dataset)
    if made is None and not options.partition.endswith(".json"):
        return scenario.partition()
    if made is None:
        where, made = options.partition, load_partition(Path(os.path.expanduser(options.partition)), dataset)
    else:
        where, info = "the partition", made.info
        if not {*info} - {"names"}:
            made = Partition(made.train, made.test, plain_info(dataset.name, labels_sha256(dataset), "python") | info)
        check_partition(made, dataset, where)
    scenario.check(made, where)
    return scenario.with_unseen_clients(Partition(made.train, made.test, made.info | scenario.further))


def set_up(config: RunConfig, dataset: Dataset, partition: Partition) -> tuple[Setup, Dataset]:
    """Return the set-up of a run, and the data set as the models take it.

    :raises ConfigError: or a subclass. An option does not fit the data set or the model.
    """
    for section in RunConfig.sections():
        dataset = section.prepared(config, dataset, partition)
    if config.augment and dataset.augmentation is None:
        raise ConfigError(f"--augment: data set {config.dataset!r} has no augmentation; leave the flag out")
    if config.augment:
        registry.resolve("augmentation", str(dataset.augmentation))
    setup = Setup.build(config, dataset)
    check_client_models(setup, dataset)
    settled: dict[str, Any] = {}
    for section in RunConfig.sections():
        settled |= section.settled(setup.config, setup, dataset)
    return replace(setup, config=setup.config.model_copy(update=settled)), dataset


def require_held_out(option: str, config: RunConfig, partition: Partition) -> None:
    """Refuse an option that looks at held-out parts if no client that trains has one.

    :raises ConfigError: names the option and the remedy.
    """
    held_out, share = partition.test.sizes[: config.training_clients], config.validation_share
    if not held_out.any():
        raise ConfigError(
            f"{option} looks at the clients' held-out parts, but no client that trains has one; begin a run with "
            "--client-test-fraction 0.2"
        )
    if share and held_out.max() * share < 1:
        raise ConfigError(
            f"--validation-share {share:g} is too small: the largest held-out part of a client has "
            f"{int(held_out.max())} samples"
        )
    choosing = {name for name in HELD_OUT if not (config.keep == "best" and PROTOCOLS[name].own_model)}
    if config.protocols and not share and not choosing & {*config.protocols}:
        raise ConfigError(f"{option} chooses by {' or '.join(sorted(choosing))}; add --protocol {max(choosing)}")


def tracking(trackers: Mapping[str, Any]) -> Any:
    """Return the part of the package fedcore-trackers that resolves a run's trackers and starts them.

    :raises ConfigError: it is not installed; with the name of the package.
    """
    return registry.needed("tracking", "processes", f"--tracker {next(iter(trackers))}")


def resolve_trackers(trackers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the trackers of a run with all their options.

    :raises UnknownNameError: a tracker is not installed.
    :raises ConfigError: an option does not exist or is out of bounds.
    """
    return tracking(trackers).resolve_trackers(trackers) if trackers else {}
