"""Objects that a program gives to a sweep instead of names: networks, plugins, data sets of a script or notebook.

They get the names that ``fedcore.run`` gives them. Each run's process reads them from its stdin, as bytes of
cloudpickle: they are never in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fedcore import ConfigError, RunConfig, RunDirectoryError
from fedcore.tools import registry, saved
from fedcore_workers import pickled

ARGUMENTS = {"plugin": "plugins", "plugins": "plugins", "model": "model", "dataset": "dataset"}
"""Options that take objects -> the argument of ``fedcore.run``."""


class SweepObjects:
    """The objects of a sweep.

    :param objects: of the sweep that goes on.
    """

    def __init__(self, objects: Mapping[registry.Key, Any] | None = None) -> None:
        self.objects: dict[registry.Key, Any] = dict(objects or {})
        """The objects by kind and name, as the registry returns them."""
        self._values: dict[str, Any] = {}

    def named(self, option: str, value: Any) -> Any:
        """Return an option's value as a sweep's file has it: classes, data and paths by their names.

        :raises ConfigError: an object that only this process has and that cannot travel, or a second one of a name.
        """
        if isinstance(value, PathLike):
            return str(value)
        argument = ARGUMENTS.get(option)
        if argument == "plugins" or not argument:
            if isinstance(value, Mapping):
                return {self.named(option, name): inner for name, inner in value.items()}
            if isinstance(value, (list, tuple)):
                return [self.named(option, inner) for inner in value]
        if option == "partition" and not (value is None or isinstance(value, str) or callable(value)):
            raise ConfigError(
                "partition: a sweep takes no lists of positions and no Partition; give a name, a partition.json, or a "
                "function of a module (labels, num_clients, **options) that returns the lists"
            )
        if value is None or isinstance(value, (str, int, float)):
            return value
        return self._name(argument, value) if argument else _importable(option, value)

    def _name(self, argument: str, value: Any) -> str:
        from fedcore.tools import name_objects  # here: it imports torch

        arguments: dict[str, Any] = {argument: [value] if argument == "plugins" else value}
        config, named_objects = name_objects(RunConfig(), **arguments)
        name = next(iter(config.plugins)) if argument == "plugins" else str(getattr(config, argument))
        if named_objects and self._values.setdefault(name, value) is not value:
            raise ConfigError(
                f"two objects of this sweep are called {saved.objects_in(config)[0]}; give them different names "
                "(data: fedcore.data.as_dataset(data, name))"
            )
        self.objects.update(named_objects)
        return name

    def as_bytes(self) -> bytes:
        """Return the objects as a run's process reads them; empty where there are none.

        :raises ConfigError: one of them cannot be pickled.
        """
        try:
            return pickled(self.objects) if self.objects else b""
        except ConfigError as error:
            names = ", ".join(name.removeprefix(registry.OBJECT) for _, name in self.objects)
            raise ConfigError(
                f"the runs' processes cannot get what was given to the sweep ({names}: {error.__cause__}); "
                "write it into a file, such as methods.py, and import it from there"
            ) from error


def _importable(option: str, value: Any) -> str:
    name = registry.import_name(value)
    if name is None or value.__module__ == "__main__":
        raise ConfigError(
            f"{option}: each run of a sweep has a process of its own, which cannot get {value!r:.80}; write it into a "
            "file, such as methods.py, and import it from there"
        )
    return name


def check_objects(objects: Mapping[registry.Key, Any], configs: Mapping[Path, RunConfig]) -> None:
    """Refuse runs of a sweep's folder whose objects were not given again, or that were begun with other data.

    :param configs: run directory -> configuration.
    :raises ConfigError: an object is missing.
    :raises RunDirectoryError: the data differ: finished runs would be taken for runs on these.
    """
    digests: dict[Any, str] = {}
    for folder, config in configs.items():
        named = [("dataset", config.dataset), ("model", config.model), *(("plugin", name) for name in config.plugins)]
        missing = [name for kind, name in named if name.startswith(registry.OBJECT) and (kind, name) not in objects]
        if missing:
            raise ConfigError(
                f"run {folder.name} has {', '.join(saved.objects_in(config))} of a Python program, which has to give "
                "it again: fedcore_study.sweep(grid, ..., out=...) with the same objects"
            )
        if ("dataset", config.dataset) in objects and (folder / "config.yaml").is_file():
            from fedcore.data import data_digest  # here: it imports torch
            from fedcore.tools import resolve_config

            data = config.dataset, config.public, config.seed if config.public else None
            if data not in digests:
                digests[data] = data_digest(resolve_config(config)[1])
            if saved.SavedConfig.read(folder / "config.yaml").data != digests[data]:
                raise RunDirectoryError(f"{folder} was begun with other data; sweep these with another out=")
