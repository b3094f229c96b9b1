"""Guards against untrusted files: they cannot import code or write outside of the run directory without permission.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, FedcoreError, RunDirectoryError, StorageError
from fedcore.base.objects import OBJECT
from fedcore.hooks.plugin import places

OWN_FOLDERS = ("checkpoint", "clients", "trackers")
"""Folders of a run directory in which fedcore itself overwrites and deletes."""

FILES = (".safetensors", ".json", ".jsonl", ".yaml")
"""How the names of a run directory's files end."""


def code_in(config: RunConfig) -> list[str]:
    """Return the names in a configuration that import code: ``module:package.attribute``."""
    single = (config.dataset, config.model, config.partition, config.engine)
    return [name for name in (*config.plugins, *config.trackers, *single) if registry.is_code(name)]


def objects_in(config: RunConfig) -> list[str]:
    """Return the arguments of ``fedcore.resume`` for what a program gave as objects: ``model=Net``."""
    given = [
        f"{kind}={name.removeprefix(OBJECT)}"
        for kind, name in (("model", config.model), ("dataset", config.dataset))
        if name.startswith(OBJECT)
    ]
    plugins = [name.removeprefix(OBJECT) for name in config.plugins if name.startswith(OBJECT)]
    return [*given, *([f"plugins=[{', '.join(plugins)}]"] if plugins else [])]


def check_code(names: Iterable[str], source: object, *, allow: bool, own: Collection[str] = ()) -> None:
    """Refuse code that a file names, unless the user allows it.

    :param source: where the names were found, for the message.
    :param own: names that the user gave directly.
    :raises ConfigError: the first name, and the flag that allows it.
    """
    for name in names:
        if not allow and name not in own:
            raise ConfigError(
                f"{source} names {name!r}, which is code that would be imported and run. Look at it, and if you trust "
                "it, add --allow-code (in Python: allow_code=True)"
            )


def places_in(config: RunConfig, directory: Path) -> list[str]:
    """Return the options, ``name.option=value``, by which trackers or the engine reach out of a run's directory."""
    return [f"{name}={value}" for name, value in _places(config) if not _is_inside(value, directory)]


def check_places_inside(config: RunConfig, directory: Path) -> None:
    """Refuse links that lead out of a run's directory in the folders in it that trackers or the engine are to use.

    :raises RunDirectoryError: what was found, and where it leads.
    """
    root = directory.resolve()
    inside = [Path(str(value)).resolve() for _, value in _places(config) if _is_inside(value, directory)]
    check_links(directory, [str(place.relative_to(root)) for place in inside if place.is_dir()])


def _places(config: RunConfig) -> list[tuple[str, Any]]:
    """Return the options, ``name.option``, that name places for trackers or the engine, with their values."""
    found = []
    chosen = [("tracker", name, given) for name, given in config.trackers.items()]
    for kind, name, given in [*chosen, ("engine", config.engine, config.engine_options)]:
        try:
            options = getattr(registry.resolve(kind, name), "Options", None) if given else None
        except FedcoreError:
            continue  # it cannot be started either
        for option in places(options) if options else ():
            value = given.get(option)
            if value is not None:
                found.append((f"{name}.{option}", value))
    return found


def check_places(places: Iterable[str], source: object, *, allow: bool, own: Collection[str] = ()) -> None:
    """Refuse places outside of a run's directory that its own configuration names, unless the user allows it.

    :raises ConfigError: the first one, and the flag that allows it.
    """
    for place in places:
        if not allow and place not in own:
            raise ConfigError(
                f"{source} has a tracker or the engine reach outside of the run directory: {place}. If you want that, "
                "add --allow-outside (in Python: allow_outside=True)"
            )


def check_links(directory: Path, folders: Iterable[str] = OWN_FOLDERS, *, deep: bool = True) -> None:
    """Refuse links that lead out of a directory, and what is neither file nor folder (a pipe would hang its reader).

    So is a folder in the place of a file, and a file in the place of a folder.

    :param folders: in which to look, too, beside the directory itself; ``deep`` also below them.
    :raises RunDirectoryError: what was found, and where it leads; or a folder cannot be looked into.
    """
    root = directory.resolve()
    for name in folders:
        if (root / name).exists() and not (root / name).is_dir():
            raise RunDirectoryError(f"{root / name} is a file, and should be a folder; delete it")
    for entry in _entries(root, folders, deep):
        if entry.is_symlink():
            target = Path(entry.path).resolve()
            if not target.is_relative_to(root):
                raise RunDirectoryError(
                    f"{entry.path} is a link that leads out of the directory, to {target}. Put the file or folder "
                    "itself there; what is read and written has to be inside"
                )
        elif not (entry.is_file() or entry.is_dir()):
            raise RunDirectoryError(f"{entry.path} is neither a file nor a folder; delete it")
        elif entry.is_dir() and entry.name.endswith(FILES):
            raise RunDirectoryError(f"{entry.path} is a folder, and should be a file; delete it")


def _entries(root: Path, folders: Iterable[str], deep: bool) -> Iterator[os.DirEntry[str]]:
    waiting = [(root, False), *((root / folder, deep) for folder in folders)]
    while waiting:
        folder, below = waiting.pop()
        if not folder.is_dir():
            continue
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError as error:
            raise StorageError(f"cannot read the folder {folder}: {error.strerror or error}") from error
        for entry in found:
            yield entry
            if below and entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry.path), True))


def _is_inside(value: object, directory: Path) -> bool:
    """Whether a value is the path of something in a directory; an address such as http://... is not."""
    text = str(value)
    return "://" not in text and "\0" not in text and Path(text).resolve().is_relative_to(directory.resolve())
