"""Objects instead of names: a model, plugins or a data set that the caller's program defines."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fedcore.base import objects, registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.base.identity import short_name
from fedcore.base.objects import Key, import_name, object_name, pickled
from fedcore.data import Dataset, as_dataset
from fedcore.hooks.plugin import Plugin
from fedcore.runs.directory import RunDirectory

ModelObject: TypeAlias = "nn.Module | Callable[..., nn.Module] | str"
"""A class of networks, a factory ``(num_classes, input_shape)``, a network with weights to start from, or a name."""

PluginObjects: TypeAlias = "Mapping[Any, Mapping[str, Any]] | Sequence[type[Plugin] | str]"
"""Plugin classes (or names) with their options, or a list of them."""

DatasetObject: TypeAlias = "Dataset | Callable[[Path | None], Dataset] | Mapping[str, Any] | Sequence[Any] | str"
"""A data set, a loader, arrays, tensors, a pair of torch's data sets (:func:`fedcore.data.as_dataset`), or a name."""


@dataclass(frozen=True)
class Given:
    """The objects that a program passed to a run."""

    objects: Mapping[Key, Any] = field(default_factory=dict)
    """The objects by kind and name."""
    only_here: str = ""
    """Why other processes cannot have the objects; empty if they can."""

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the registry find the objects until the block ends."""
        with objects.lent(self.objects):
            yield

    def workers(self, config: RunConfig) -> dict[str, Any]:
        """Return the option to change so that only this process needs the objects; empty if it does not change.

        :raises ConfigError: the engine runs clients in other processes.
        """
        if not self.only_here or config.workers == 0:
            return {}
        if config.engine != "local":
            raise ConfigError(f"engine {config.engine!r} runs clients in other processes, but {self.only_here}")
        return {"workers": 0}

    @property
    def note(self) -> str:
        """The message for the user if :meth:`workers` changed an option."""
        return f"{self.only_here}: this run uses this process only"


def name_objects(
    config: RunConfig,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
) -> tuple[RunConfig, Given]:
    """Return the configuration with the names of objects, and the objects by these names.

    :raises ConfigError: an option is given both in the configuration and as an object.
    """
    for option, value in (("model", model), ("plugins", plugins), ("dataset", dataset)):
        if value is not None and option in config.model_fields_set and getattr(config, option) not in ("auto", {}):
            raise ConfigError(f"{option} is an option of the configuration and given as an object; give it once")
    found: dict[Key, Any] = {}
    values: dict[str, Any] = {}
    if model is not None:
        values["model"] = _add(found, "model", model)
    if plugins is not None:
        chosen = plugins.items() if isinstance(plugins, Mapping) else [(plugin, {}) for plugin in _listed(plugins)]
        named = [(_add(found, "plugin", plugin), dict(options)) for plugin, options in chosen]
        values["plugins"] = RunConfig(plugins=[{name: options} for name, options in named]).plugins
    if dataset is not None:
        values["dataset"] = _add(found, "dataset", dataset)
    return config.model_copy(update=values), _given(found)


def given_again(
    path: Path, model: ModelObject | None, plugins: PluginObjects | None, dataset: DatasetObject | None
) -> tuple[RunConfig | None, Given]:
    """Return a saved run's configuration and the objects by its names; None and no objects if no object is given."""
    if model is None and plugins is None and dataset is None:
        return None, Given()
    saved = RunDirectory.open(path).read_config()
    return saved, objects_again(saved, model, plugins, dataset)


def objects_again(
    config: RunConfig,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
) -> Given:
    """Return objects by the names that a saved configuration has for them. Arguments that are names are skipped.

    :raises ConfigError: the saved run has no plugin with the name of a class.
    """
    found: dict[Key, Any] = {}
    if model is not None and not isinstance(model, str):
        found["model", config.model] = model
    for plugin in _listed(plugins or ()):
        if not isinstance(plugin, str):
            name = getattr(plugin, "__name__", "")
            names = [saved for saved in config.plugins if short_name(saved) == name]
            if not names:
                raise ConfigError(f"the run has no plugin {name!r}; it has {', '.join(config.plugins) or 'none'}")
            found["plugin", names[0]] = plugin
    if dataset is not None and not isinstance(dataset, str):
        found["dataset", config.dataset] = dataset
    return _given(found)


def _listed(plugins: PluginObjects) -> list[Any]:
    if isinstance(plugins, (str, type)):
        raise ConfigError(f"plugins is {plugins!r}; write a list, plugins=[...], or a mapping to options")
    return list(plugins)


def _add(found: dict[Key, Any], kind: str, value: Any) -> str:
    """Return the name of an object, and add the object under this name unless the name alone finds it."""
    if isinstance(value, str):
        return value
    path = import_name(value)
    if path is not None:
        entry = path.removeprefix(objects.CODE)
        for name, point in registry.available(kind).items():
            if point.value.replace(":", ".") == entry:
                return name
    name = path or _name_of_value(value)
    if path is None or value.__module__ == "__main__":
        found[kind, name] = value
    return name


def _name_of_value(value: Any) -> str:
    if isinstance(value, Dataset):
        return f"{objects.OBJECT}{value.name}"
    if isinstance(value, (Mapping, Sequence)):
        return object_name(value[0]) if len(value) == 2 and isinstance(value, Sequence) else f"{objects.OBJECT}arrays"
    return object_name(value)


def _given(found: Mapping[Key, Any]) -> Given:
    """Return objects in the form that the registry returns, with the reason if other processes cannot have them."""
    lent = {key: _usable(key, value) for key, value in found.items()}
    reason = ""
    for (kind, name), value in lent.items():
        try:
            pickled(value)
        except Exception as error:  # a program's objects can raise anything
            reason = f"the {kind} {short_name(name)!r} cannot be sent to other processes ({error})"
    return Given(lent, reason)


def _usable(key: Key, value: Any) -> Any:
    """Return an object in the form that the registry returns: a factory of models, a loader of data."""
    if key[0] == "model" and isinstance(value, nn.Module):
        return functools.partial(copy.deepcopy, value)
    if key[0] == "dataset" and not callable(value):
        dataset = as_dataset(value, key[1])
        return lambda data_dir: dataset
    return value
