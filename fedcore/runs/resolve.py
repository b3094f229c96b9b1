"""Resolve a configuration before anything runs or is written: replace ``auto``, load data, split it.

``--autotune`` chooses the memory format of images and convolutions by measurement instead of a fixed rule.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedcore.base import registry
from fedcore.base.config import ExecutionOptions, FederationOptions, MethodOptions, RunConfig
from fedcore.base.errors import ConfigError
from fedcore.base.process import cores
from fedcore.client.setup import Setup, first_sample
from fedcore.data import Dataset, Partition, ResidentSamples, load_dataset, load_partition
from fedcore.data.assign import Scenario, with_public
from fedcore.data.dataset import data_digest
from fedcore.data.partition import check_partition, labels_sha256, plain_info
from fedcore.hooks.plugin import BUILTIN, parse_options
from fedcore.hooks.plugins import PluginSet
from fedcore.models import SplitModel
from fedcore.models.build import with_digest
from fedcore.models.placement import Placement, convolves, problem_in_channels_last, resolve_device

FORMATS: tuple[str, ...] = ("contiguous", "channels_last")
SMALLEST_STACK, LARGEST_STACK = 12, 50
"""The stacks that ``--stack auto`` chooses. On digits 4 clients in a stack were slower than 1, and 25 twice as fast."""
TURNS = 15
"""The steps that ``--autotune`` takes in each memory format. The first ones are slow, so the fastest one counts."""


def resolve(config: RunConfig, dataset: Dataset | None = None) -> tuple[RunConfig, Dataset]:
    """Replace ``auto`` and load the data. Names are checked before any long work.

    :param dataset: the configured data set, if it is loaded already.
    :returns: the configuration with all options of its plugins and engine, and the data set. Only the memory format
        and the stack, which depend on the model, stay ``auto``.
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
        dataset = load_dataset(config.dataset, config.data_dir)
        dataset = with_public(dataset, config.public, config.seed, config.data_dir)
    if not len(dataset.test):
        raise ConfigError(f"data set {config.dataset!r} has no test samples, but every run is evaluated on some")
    _ = Scenario(config, dataset).unseen  # a wrong domain is refused before any long work
    if config.augment and dataset.augmentation is None:
        raise ConfigError(f"--augment: data set {config.dataset!r} has no augmentation; leave the flag out")
    if config.augment:
        registry.resolve("augmentation", str(dataset.augmentation))
    models = [usual_model(dataset) if name == "auto" else name for name in config.client_models or [config.model]]
    resolved: dict[str, Any] = {
        "plugins": plugin_options(config, plugins),
        "engine_options": engine_options,
        "model": models[0],
        "client_models": models if config.client_models else [],
        "device": str(device),
        "weights": None if config.weights is None else with_digest(config.weights),
    }
    return config.model_copy(update=resolved), dataset


def digest_of_data(config: RunConfig) -> str:
    """Return the digest of a run's data as its config.yaml will have it."""
    return data_digest(resolve(config)[1])


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


def resolve_partition(options: FederationOptions, dataset: Dataset, made: Partition | None = None) -> Partition:
    """Split the samples among the clients, or take the partition of a file or of the program.

    :param made: the program's partition instead of the configured one.
    """
    scenario = Scenario(options, dataset)
    if made is None and not options.partition.endswith(".json"):
        return scenario.partition()
    if made is None:
        where, made = options.partition, load_partition(Path(os.path.expanduser(options.partition)), dataset)
    else:
        where = "the partition"
        if not made.info:
            made = Partition(made.train, made.test, plain_info(dataset.name, labels_sha256(dataset), "python"))
        check_partition(made, dataset, where)
    scenario.check(made, where)
    return scenario.with_unseen_clients(made)


def tracking(trackers: Mapping[str, Any]) -> Any:
    """Return the part of the package fedcore-trackers that resolves a run's trackers and starts them.

    :raises UnknownNameError: it is not installed; with the name of the package.
    """
    if "processes" not in registry.available("tracking"):
        registry.resolve("tracker", next(iter(trackers)))  # names the package that is missing
    return registry.resolve("tracking", "processes")


def resolve_trackers(trackers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the trackers of a run with all their options.

    :raises UnknownNameError: a tracker is not installed.
    :raises ConfigError: an option does not exist or is out of bounds.
    """
    return tracking(trackers).resolve_trackers(trackers) if trackers else {}


def tuned(config: RunConfig, model: SplitModel, dataset: Dataset) -> RunConfig:
    """Return the configuration with the memory format in which training steps are faster on this machine.

    A format that the user chose stays. ``auto`` stays, too, if the model or the data set leaves no choice.
    """
    if config.memory_format != "auto" or not convolves(model) or not isinstance(dataset.train, ResidentSamples):
        return config
    if problem_in_channels_last(model, first_sample(dataset)):
        return config
    seconds = measure(config, model, dataset)
    return config.model_copy(update={"memory_format": min(seconds, key=lambda name: seconds[name])})


def usual_stack(setup: Setup) -> int:
    """Return the stack that ``--stack auto`` stands for; 1 where clients that train as one are not faster.

    The stacks of a round keep every worker busy. A convolution is slower in a stack on a CPU, and so is a small stack.
    """
    config = setup.config
    workers = cores() if config.workers is None else max(1, config.workers)
    size = min(LARGEST_STACK, math.ceil(config.cohort_size / workers))
    alone = why_unstacked(setup) or config.device != "cpu" or convolves(setup.model) or config.client_timeout
    return 1 if alone or config.max_waiting or config.lanes > 1 or size < SMALLEST_STACK else size


def why_unstacked(setup: Setup) -> str:
    """Return the reason for which no clients come together to train as one; empty if they do."""
    if setup.config.engine != "local":
        return f"--engine {setup.config.engine} trains clients one by one"
    if setup.config.client_models:
        return "clients have models of their own (--client-models)"
    for name in [name for names in setup.breaks.values() for name in names]:
        return f"plugin {name!r} pauses clients in the middle of their training"
    for plugin in setup.plugins.implementers("broadcast_to"):
        return f"plugin {plugin.name!r} sends each client tensors of its own"
    return ""


def measure(config: RunConfig, model: SplitModel, dataset: Dataset) -> dict[str, float]:
    """Return the minimum seconds of a training step in each memory format, measured in turns."""
    steps = {name: _step(config.model_copy(update={"memory_format": name}), model, dataset) for name in FORMATS}
    found = dict.fromkeys(FORMATS, float("inf"))
    for _ in range(TURNS):
        for name, step in steps.items():
            found[name] = min(found[name], step())
    return found


def _step(config: RunConfig, model: SplitModel, dataset: Dataset) -> Callable[[], float]:
    """Return a function that trains a copy of the model on one batch, and returns the seconds that it took."""
    placement = Placement.of(config, model, None)
    model = placement.model(copy.deepcopy(model)).train()
    rows = torch.arange(min(config.batch_size, len(dataset.train)))
    x = dataset.train.gather(rows).to(placement.device).contiguous(memory_format=placement.memory_format)
    y = dataset.train.labels[rows].to(placement.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=config.momentum)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x)[1], y).backward()
        optimizer.step()
        if placement.device.type == "cuda":
            torch.cuda.synchronize(placement.device)
        return time.perf_counter() - began

    return step
