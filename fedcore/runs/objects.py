"""Objects instead of names: a model, plugins or a data set that the caller's program defines."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, UnknownNameError
from fedcore.base.identity import full_name, short_name
from fedcore.base.metrics import Metric
from fedcore.base.registry import CODE, OBJECT, Key, import_name, object_name
from fedcore.data import Dataset, IndexLists, Partition
from fedcore.hooks.plugin import BUILTIN, Plugin
from fedcore.models.split import copied, gradient_hooks
from fedcore.runs.directory import RunDirectory

ModelObject: TypeAlias = "nn.Module | Callable[..., nn.Module] | str"
"""A class of networks, a factory ``(num_classes, input_shape)``, a network with weights to start from, or a name."""

ModelObjects: TypeAlias = "ModelObject | Sequence[ModelObject]"
"""A model of all clients, or several: client k gets number k mod n."""

PluginObjects: TypeAlias = (
    "Mapping[Any, Mapping[str, Any]] | Sequence[type[Plugin] | str | Mapping[str, Any]] | type[Plugin] | str"
)
"""Plugin classes (or names) with their options, a list of them, each with or without options, or one of them."""

DatasetObject: TypeAlias = "Dataset | Callable[[Path | None], Dataset] | Mapping[str, Any] | Sequence[Any] | str"
"""A data set, a loader, arrays, tensors, a pair of torch's data sets (:func:`fedcore.data.as_dataset`), or a name."""

PartitionObject: TypeAlias = "Partition | Callable[..., Any] | Mapping[str, Any] | Sequence[Any] | str"
"""A partition, a partitioner, one array of positions per client in a list or by the clients' names, or a name."""

MetricObjects: TypeAlias = "Sequence[Callable[[int], Metric] | str] | Callable[[int], Metric] | str"
"""Metric classes (or names), or one of them."""


def name_objects(
    config: RunConfig,
    model: ModelObjects | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    metrics: MetricObjects | None = None,
    partition: PartitionObject | None = None,
) -> tuple[RunConfig, dict[Key, Any]]:
    """Return the configuration with the names of objects, and the objects by kind and name, for the registry.

    A plugin that is given without options keeps the options that the configuration has for it.
    A :class:`Partition` also has a name: runs with different partitions have different configurations.
    """
    objects: dict[Key, Any] = {}
    values: dict[str, Any] = {}
    if isinstance(model, (list, tuple)):
        values["client_models"] = [_add(objects, "model", each) for each in model]
        values["model"] = "auto"
    elif model is not None:
        values["model"] = _add(objects, "model", model)
    if plugins is not None:
        pairs = [(_add(objects, "plugin", plugin), dict(options)) for plugin, options in _with_options(plugins)]
        written = [{name: options or config.plugins.get(name, {})} for name, options in pairs]
        values["plugins"] = RunConfig.create({"plugins": written}).plugins
    if dataset is not None:
        values["dataset"] = _add(objects, "dataset", dataset)
    if metrics is not None:
        values["metrics"] = RunConfig(metrics=[_add(objects, "metric", metric) for metric in _listed(metrics)]).metrics
    if isinstance(partition, Partition):
        values["partition"] = f"{OBJECT}{partition.sha256[:12]}"
    elif isinstance(partition, (list, tuple, Mapping)):
        parts = [*partition.values()] if isinstance(partition, Mapping) else partition
        lists = Partition(parts, IndexLists.empty(len(parts)))
        values["partition"] = f"{OBJECT}{lists.sha256[:12]}"
        listed = registry.needed("feature", "listed_parts", "partition as a list")
        objects["partitioner", values["partition"]] = functools.partial(listed, partition)
    elif isinstance(partition, str) or callable(partition):
        values["partition"] = _add(objects, "partitioner", partition)
    elif partition is not None:
        raise ConfigError(
            f"partition is a {type(partition).__name__}; give a name, a fedcore.data.Partition, a function (labels, "
            "num_clients, **options), a list with one array of positions per client, or a mapping by the clients' names"
        )
    return config.model_copy(update=values), objects


def count_of(partition: PartitionObject | None) -> dict[str, int]:
    """Return the option ``clients`` for a partition or lists of a program; empty without them."""
    if isinstance(partition, Partition):
        return {"clients": partition.num_clients}
    return {"clients": len(partition)} if isinstance(partition, (list, tuple, Mapping)) else {}


def objects_again(
    path: Path, model: ModelObjects | None, plugins: PluginObjects | None, dataset: DatasetObject | None
) -> dict[Key, Any]:
    """Return objects by the names that a saved run has for them. Arguments that are names have no object.

    :raises ConfigError: the saved run has no such plugin, or has other options for it.
    """
    if model is None and plugins is None and dataset is None:
        return {}
    config = RunDirectory.open(path).read_config()
    models = model if isinstance(model, (list, tuple)) else [model]
    names = config.client_models if models is model else [config.model]
    if len(names) != len(models):
        raise ConfigError(f"the run has {len(names)} models for its clients, model has {len(models)}")
    pairs = [(("model", name), each) for name, each in zip(names, models, strict=True)]
    pairs += [(("dataset", config.dataset), dataset)]
    for plugin, options in _with_options(plugins or ()):
        name = short_name(_add({}, "plugin", plugin))
        if name == BUILTIN:
            continue
        saved = full_name(name, config.plugins)
        if saved not in config.plugins:
            raise ConfigError(f"the run has no plugin {name!r}; it has {', '.join(config.plugins) or 'none'}")
        _require_same(name, options, config.plugins[saved])
        pairs += [(("plugin", saved), plugin)]
    return {key: _usable(key[0], value) for key, value in pairs if value is not None and not isinstance(value, str)}


def _require_same(name: str, options: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse options of a plugin that are not the saved run's.

    :raises ConfigError: with both values.
    """
    for option, value in options.items():
        if option not in saved:
            raise UnknownNameError(f"{name} option", option, saved)
        if json.loads(json.dumps(value, default=str)) != saved[option]:  # as config.yaml has it: lists, not tuples
            raise ConfigError(
                f"{name}.{option} is {saved[option]!r} in the run, {value!r} is given; options of a plugin cannot "
                "change after the start of a run"
            )


def _with_options(plugins: PluginObjects) -> list[tuple[Any, Mapping[str, Any]]]:
    listed = [plugins] if isinstance(plugins, Mapping) else _listed(plugins)
    return [pair for item in listed for pair in (item.items() if isinstance(item, Mapping) else [(item, {})])]


def _listed(objects: Any) -> list[Any]:
    return [objects] if isinstance(objects, (str, Plugin, Metric)) or callable(objects) else list(objects)


def _add(objects: dict[Key, Any], kind: str, value: Any) -> str:
    """Return the name of an object, and add the object under this name unless the name alone finds it.

    Two networks of one class are two models.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (Plugin, Metric)):
        own = type(value).__name__
        how = f" and its options: plugins={{{own}: {{...}}}}" if kind == "plugin" else f": metrics=[{own}]"
        raise ConfigError(f"{kind}s has an object of {own}; give the class{how}")
    path = import_name(value)
    if path is not None:
        entry = path.removeprefix(CODE)
        for name, point in registry.available(kind).items():
            if point.value.replace(":", ".") == entry:
                return name
    name = path or _name_of_value(value)
    if path is None or value.__module__ == "__main__":
        if kind == "model" and (kind, name) in objects:
            name = f"{name}-{len(objects)}"
        objects[kind, name] = _usable(kind, value)
    return name


def _name_of_value(value: Any) -> str:
    if isinstance(value, Dataset):
        return f"{OBJECT}{value.name}"
    if isinstance(value, (Mapping, Sequence)):
        return object_name(value[0]) if len(value) == 2 and isinstance(value, Sequence) else f"{OBJECT}arrays"
    return object_name(value)


def _usable(kind: str, value: Any) -> Any:
    """Return an object in the form that the registry returns: a factory of models, a loader of data."""
    if kind == "model" and isinstance(value, nn.Module):
        return functools.partial(copied, value, hooks=gradient_hooks(value))
    if kind == "dataset" and not callable(value):
        return lambda data_dir: value
    return value
