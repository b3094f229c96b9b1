"""Resolve a configuration before anything runs or is written: replace every ``auto``, load data, split it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore.base import registry
from fedcore.base.config import RunConfig, public_share
from fedcore.base.errors import ConfigError
from fedcore.data import Dataset, Partition, load_dataset, load_partition, make_partition
from fedcore.data.assign import public_rows, with_public
from fedcore.hooks.plugin import BUILTIN, parse_options
from fedcore.hooks.plugins import PluginSet
from fedcore.models.build import with_digest
from fedcore.models.placement import resolve_device


def resolve(config: RunConfig, dataset: Dataset | None = None) -> tuple[RunConfig, Dataset]:
    """Replace every ``auto`` and load the data. Names are checked before any long work.

    :param dataset: the configured data set, if it is loaded already.
    :returns: the configuration with all options of its plugins and engine, and the data set. Only the memory format
        stays ``auto``, with ``autotune``.
    :raises ConfigError: or a subclass. A name or option is unknown, or options cannot be combined.
    """
    plugins = PluginSet.create(config.plugins)
    engine_options = resolve_engine(config)
    device = resolve_device(config.device)
    if config.precision == "tf32" and device.type != "cuda":
        raise ConfigError("--precision tf32 needs a CUDA device; on a CPU use float32 or bf16")
    if config.model != "auto":
        registry.resolve("model", config.model)
    if dataset is None:
        dataset = load_dataset(config.dataset, config.data_dir)
        dataset = with_public(dataset, config.public, config.seed, config.data_dir)
    if config.augment and dataset.augmentation is None:
        raise ConfigError(f"--augment: data set {config.dataset!r} has no augmentation; leave the flag out")
    if config.augment:
        registry.resolve("augmentation", str(dataset.augmentation))
    resolved: dict[str, Any] = {
        "plugins": plugin_options(config, plugins),
        "engine_options": engine_options,
        "model": usual_model(dataset) if config.model == "auto" else config.model,
        "device": str(device),
        "weights": None if config.weights is None else with_digest(config.weights),
    }
    return config.model_copy(update=resolved), dataset


def resolve_engine(config: RunConfig) -> dict[str, Any]:
    """Return the engine's options with their defaults. An engine declares them in its ``Options``.

    :raises ConfigError: or a subclass. The engine or an option is unknown, or a value is out of bounds.
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


def plugin_options(config: RunConfig, plugins: PluginSet) -> dict[str, dict[str, Any]]:
    """Return the options of a configuration's plugins with their defaults, without the built-in plugin."""
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
    """Split the samples among the clients, or read the partition from a file."""
    if config.partition.endswith(".json"):
        partition = load_partition(Path(config.partition), dataset)
        if partition.num_clients != config.clients:
            raise ConfigError(
                f"--clients is {config.clients}, but {config.partition} is a partition among {partition.num_clients} "
                f"clients; write --clients {partition.num_clients}"
            )
        if config.samples is not None:
            raise ConfigError(f"--samples: {config.partition} already says which samples are used; leave it out")
        if config.client_test_fraction not in (0, partition.info["client_test_fraction"]):
            raise ConfigError(
                f"--client-test-fraction is {config.client_test_fraction}, but {config.partition} was made with "
                f"{partition.info['client_test_fraction']}; leave it out, or make the file again with fedcore data "
                f"split --client-test-fraction {config.client_test_fraction}"
            )
        _require_private(config, dataset, partition)
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
        public=None if public_share(config.public) is None else _public_rows(config, dataset),
    )


def _public_rows(config: RunConfig, dataset: Dataset) -> Tensor:
    return public_rows(dataset.train.labels, config.public, config.seed)


def _require_private(config: RunConfig, dataset: Dataset, partition: Partition) -> None:
    """Refuse a partition that gives public samples to clients."""
    if public_share(config.public) is None:
        return
    held = torch.cat([partition.train.positions, partition.test.positions])
    both = int(torch.isin(held, _public_rows(config, dataset)).sum())
    if both:
        raise ConfigError(
            f"--public {config.public}: {config.partition} gives {both} of these samples to clients; make the "
            "partition with fedcore data split and the same --public and --seed, or name another data set"
        )
