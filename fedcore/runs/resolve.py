"""What a configuration stands for, before anything runs or is written: every ``auto`` resolved, data dealt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.data import Dataset, Partition, load_dataset, load_partition, make_partition
from fedcore.hooks.plugin import parse_options
from fedcore.hooks.plugins import BUILTIN, PluginSet
from fedcore.models.placement import resolve_device


def resolve_config(config: RunConfig) -> tuple[RunConfig, Dataset]:
    """Replace every ``auto`` by what it stands for and load the data; checks names before any long work."""
    options = resolve_plugins(config)
    engine_options = resolve_engine(config)
    device = resolve_device(config.device)
    if config.precision == "tf32" and device.type != "cuda":
        raise ConfigError("--precision tf32 is arithmetic of CUDA devices; on a CPU use float32 or bf16")
    if config.model != "auto":
        registry.resolve("model", config.model)
    dataset = load_dataset(config.dataset, config.data_dir)
    if config.augment and dataset.augmentation is None:
        raise ConfigError(f"--augment: data set {config.dataset!r} has no augmentation; leave the flag out")
    model = usual_model(dataset) if config.model == "auto" else config.model
    resolved = {"plugins": options, "engine_options": engine_options, "model": model, "device": str(device)}
    return config.model_copy(update=resolved), dataset


def resolve_engine(config: RunConfig) -> dict[str, Any]:
    """Return the engine's options, defaults included; an engine that takes some names them in its ``Options``.

    :raises ConfigError: and its kin, an unknown engine or option, or a value out of bounds.
    """
    engine = registry.resolve("engine", config.engine)
    if not hasattr(engine, "Options"):
        if config.engine_options:
            raise ConfigError(
                f"engine {config.engine!r} has no options, but {next(iter(config.engine_options))!r} is set for it"
            )
        return {}
    options = parse_options(config.engine, engine, config.engine_options, kind="engine")
    return options.model_dump(mode="json", by_alias=True)


def resolve_plugins(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the plugins with all their options, defaults included; without the built-in one.

    :raises ConfigError: and its kin, an unknown name or option, or plugins that cannot be combined.
    """
    plugins = PluginSet.create(config.plugins)
    names = [name for name in config.plugins if name != BUILTIN]
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


def resolve_partition(config: RunConfig, dataset: Dataset) -> Partition:
    """Deal the samples, or read who holds what from a file."""
    if config.partition.endswith(".json"):
        partition = load_partition(Path(config.partition), dataset)
        if partition.num_clients != config.clients:
            raise ConfigError(
                f"--clients is {config.clients}, but {config.partition} deals to {partition.num_clients} clients; "
                f"write --clients {partition.num_clients}"
            )
        if config.samples is not None:
            raise ConfigError(f"--samples: {config.partition} says already which samples are dealt; leave it out")
        return partition
    return make_partition(
        dataset,
        partitioner=config.partition,
        clients=config.clients,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        client_test_fraction=config.client_test_fraction,
        samples=config.samples,
        seed=config.seed,
    )
