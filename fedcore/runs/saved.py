"""A run's files without torch: config.yaml with its options, their binding, and the permissions that users give.

The binding consists of the options that can change the bits, the partition, and the content of the data set.
``config.yaml`` holds it as digests, and every checkpoint holds it, too. A resume refuses to break it: with an edited
configuration or other data it would continue another run than the one that was begun. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, FedcoreError, RunDirectoryError
from fedcore.base.files import RecordFile, parse_record, refuse_links, write_text
from fedcore.base.identity import CHANGEABLE, WITHOUT_EFFECT
from fedcore.base.registry import OBJECT
from fedcore.base.safe_yaml import BESIDE_OPTIONS, read_mapping, write_yaml
from fedcore.base.section import unknown_option
from fedcore.hooks.plugin import places

HOW_TO_CHANGE = (
    "Undo the change. Options that can change, such as --rounds, are options of fedcore resume; for any other change "
    "start a new run: fedcore train --config FILE --out NEW_FOLDER"
)

SOURCE = "source of "
"""The beginning of the names, among the versions of a run, of the hashes of its plugins' packages."""

_PARTS = {"partition": "who holds which samples (partition.json)", "data": "the data set's content"}


@dataclass(frozen=True)
class SavedConfig:
    """The content of a run's config.yaml."""

    values: Mapping[str, Any]
    """The options, as plain values."""
    partition: str
    """The digest of the partition: who holds which samples."""
    data: str
    """The digest of the data set's content."""
    versions: Mapping[str, Any]
    """The versions that were installed when the run was begun."""
    history: Sequence[Mapping[str, Any]] = ()
    """The changes made on purpose at a resume, oldest first; the key ``changes`` of the file.

    Each has the round, and by option the values before and after.
    """

    @classmethod
    def read(cls, file: Path, checkpoint: Callable[[], Any] = lambda: None) -> SavedConfig:
        """Read a run's own config.yaml. Its options must not have changed since fedcore wrote it.

        :param checkpoint: returns the binding in a checkpoint, which shows the option that changed.
        :raises RunDirectoryError: the options have changed.
        :raises ConfigError: the file cannot be read, or it holds an option that this fedcore does not know.
        """
        content = read_mapping(file, plain=True)
        values = {name: value for name, value in content.items() if name not in BESIDE_OPTIONS}
        for name in values.keys() - RunConfig.model_fields:  # without the option's package the digest would differ
            raise unknown_option(name, RunConfig.model_fields, f"(in {file})")
        digests, versions, changes = (content.get(name) for name in ("digests", "versions", "changes"))
        if not (isinstance(digests, dict) and set(digests) == {"settings", *_PARTS}):
            raise RunDirectoryError(f"{file} is damaged: `digests` is incomplete. {HOW_TO_CHANGE}")
        versions = versions if isinstance(versions, dict) else {}
        saved = cls(values, digests["partition"], digests["data"], versions, changes or ())
        if digests["settings"] != saved._digest():
            binding = checkpoint()
            differing = _differing(saved.binding["settings"], binding["settings"]) if binding else []
            raise RunDirectoryError(
                f"{file} was changed since it was written{': ' * bool(differing)}{'; '.join(differing)}. "
                f"{HOW_TO_CHANGE}"
            )
        return saved

    def write(self, file: Path) -> None:
        """Write the file.

        :raises ConfigError: as :func:`write_yaml` does.
        :raises StorageError: the file cannot be written.
        """
        digests = {"settings": self._digest(), "partition": self.partition, "data": self.data}
        changes = {"changes": list(self.history)} if self.history else {}
        write_text(file, write_yaml({**self.values, "digests": digests, **changes, "versions": dict(self.versions)}))

    def config(self, out: Path) -> RunConfig:
        """Return the options of a run whose directory is now at ``out``.

        :raises ConfigError: a value is out of bounds.
        """
        return RunConfig.create({**self.values, "out": str(out)}, source=str(out / "config.yaml"))

    def with_changes(self, changes: Mapping[str, tuple[Any, Any]], round: int) -> SavedConfig:
        """Return the file with options changed on purpose.

        :param changes: option -> its values before and after.
        """
        values = {**self.values, **{name: after for name, (_, after) in changes.items()}}
        entry = {"round": round, **{name: list(pair) for name, pair in changes.items()}}
        return replace(self, values=values, history=[*self.history, entry])

    @property
    def binding(self) -> dict[str, Any]:
        """The binding, which checkpoints carry."""
        settings = {name: value for name, value in self.values.items() if name not in WITHOUT_EFFECT}
        return {"settings": settings, "partition": self.partition, "data": self.data}

    def _digest(self) -> str:
        return _sha256([sorted(self.binding["settings"].items()), self.history])

    def require(self, partition: str, data: str, directory: Path) -> None:
        """Refuse a partition or data with other digests than at the beginning of the run.

        :raises RunDirectoryError: with the differences.
        """
        differing = [
            _PARTS[name] for name, now in (("partition", partition), ("data", data)) if getattr(self, name) != now
        ]
        if differing:
            raise RunDirectoryError(
                f"{directory} does not hold together: {' and '.join(differing)} changed since the run was begun. "
                f"{HOW_TO_CHANGE}"
            )

    def require_binding(self, binding: Mapping[str, Any], directory: Path) -> None:
        """Refuse the binding of a checkpoint that belongs to another run. Options that a resume may change can differ.

        :raises RunDirectoryError: with the differences.
        """
        settings = {**binding["settings"], **{name: self.values.get(name) for name in CHANGEABLE}}
        differing = _differing(self.binding["settings"], settings)
        differing += [words for name, words in _PARTS.items() if getattr(self, name) != binding[name]]
        if differing:
            raise RunDirectoryError(
                f"{directory} does not hold together, its checkpoint differs from config.yaml: "
                f"{'; '.join(differing)}. {HOW_TO_CHANGE}"
            )


def partition_digest(sha256: str, info: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of a partition.

    :param sha256: the hash of its index lists.
    :param info: how it was made.
    """
    return _sha256([sha256, dict(sorted(info.items()))])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _differing(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Return, in words, the settings of both mappings that differ."""
    names = [name for name in sorted(now.keys() & then.keys()) if now[name] != then[name]]
    return [f"{name} is {now[name]!r:.60}, the checkpoint was written with {then[name]!r:.60}" for name in names]


def code_in(config: RunConfig) -> list[str]:
    """Return the names in a configuration that import code: ``module:package.attribute``."""
    return [name for name in dict.fromkeys(config.names()) if registry.is_code(name)]


def objects_in(config: RunConfig) -> list[str]:
    """Return the arguments of ``fedcore.resume`` for objects that a program passed to the run: ``model=Net``."""
    arguments = [
        f"{kind}={name.removeprefix(OBJECT)}"
        for kind, name in (("model", "" if config.client_models else config.model), ("dataset", config.dataset))
        if name.startswith(OBJECT)
    ]
    if any(name.startswith(OBJECT) for name in config.client_models):
        arguments.append(f"model=[{', '.join(name.removeprefix(OBJECT) for name in config.client_models)}]")
    for kind, names in (("plugins", config.plugins), ("metrics", config.metrics)):
        listed = [name.removeprefix(OBJECT) for name in names if name.startswith(OBJECT)]
        arguments += [f"{kind}=[{', '.join(listed)}]"] if listed else []
    return arguments


def how_to_resume(directory: Path, config: RunConfig | None) -> str:
    """Return the command that goes on with a run, with the flags that its configuration needs.

    :param config: None if it cannot be read.
    """
    allowed = []
    if config is not None:
        to_import = any(map(registry.is_code, (*config.trackers, config.engine)))  # not for a hint
        allowed += ["code"] if code_in(config) else []
        allowed += ["outside"] if not to_import and places_in(config, directory) else []
        if arguments := objects_in(config):
            words = [repr(str(directory)), *arguments, *(f"allow_{each}=True" for each in allowed)]
            return f"in Python, fedcore.resume({', '.join(words)})"
    return " ".join([f"fedcore resume {shlex.quote(str(directory))}", *(f"--allow-{each}" for each in allowed)])


class RunFiles:
    """The files of a run directory that can be read without torch: configuration, records, summary.

    ``metrics`` has a record per round, and ``sessions`` one per process that trained the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = RecordFile(path / "metrics.jsonl")
        self.sessions = RecordFile(path / "sessions.jsonl")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory of an earlier run.

        :raises RunDirectoryError: the directory holds no run, or it holds a link.
        """
        if not os.path.lexists(path / "config.yaml"):
            raise RunDirectoryError(
                f"{path} is not a run directory: it has no config.yaml. "
                f"{_meant(path) or 'Name the folder that train printed.'}"
            )
        refuse_links(path)
        return cls(path.resolve())

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with this run, with the flags that its configuration needs."""
        with contextlib.suppress(FedcoreError):
            return how_to_resume(self.path, self.read_config())
        return how_to_resume(self.path, None)

    @property
    def partition_file(self) -> Path:
        """The partition: which client holds which samples."""
        return self.path / "partition.json"

    def read_config(self) -> RunConfig:
        """Read the run's configuration back; raises as :meth:`SavedConfig.read`."""
        return self.read_saved().config(self.path)

    def read_saved(self) -> SavedConfig:
        """Read config.yaml; raises as :meth:`SavedConfig.read`."""
        return SavedConfig.read(self.path / "config.yaml")

    def read_summary(self, note: Callable[[str], None] | None = None) -> dict[str, Any] | None:
        """Return summary.json, or None if it is missing or damaged.

        :param note: called with a message if it is damaged.
        """
        file = self.path / "summary.json"
        try:
            return parse_record(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if note is not None:
                note(f"{file} is damaged: {error}. It is written again when the run is finished")
            return None


def _meant(path: Path) -> str:
    """Return a hint on the run that is listed under a name, below ``runs`` or ``sweeps``; empty if there is none."""
    parent, name = glob.escape(str(path.parent)), glob.escape(path.name)
    for folder in (f"{parent}/runs/{name}", f"runs/{parent}/{name}", f"runs/*-{name}", f"sweeps/*/runs/{name}"):
        if files := sorted(glob.glob(f"{folder}/config.yaml")):
            return f"Did you mean {os.path.normpath(os.path.dirname(files[-1]))}?"
    return ""


def check_code(names: Iterable[str], source: object, *, allow: bool, own: Collection[str] = ()) -> None:
    """Refuse code that a file names, unless the user allows it.

    :param source: the place of the names, for the message.
    :param own: the names that the user gave directly.
    :raises ConfigError: with the first name, and the flag that allows it.
    """
    if not allow and (refused := [name for name in names if name not in own]):
        raise ConfigError(
            f"{source} names {refused[0]!r}, which is code that would be imported and run. Look at it, and if you "
            "trust it, add --allow-code (in Python: allow_code=True)"
        )


def places_in(config: RunConfig, directory: Path) -> list[str]:
    """Return the options, ``name.option=value``, with which trackers or the engine leave a run's directory."""
    outside = []
    chosen = [("tracker", *item) for item in config.trackers.items()]
    for kind, name, values in [*chosen, ("engine", config.engine, config.engine_options)]:
        try:
            options = getattr(registry.resolve(kind, name), "Options", None) if values else None
        except FedcoreError:
            continue  # an unknown name cannot be started, so it cannot reach anything
        for option in places(options) if options else ():
            value = values.get(option)
            if value is not None and not _is_inside(value, directory):
                outside.append(f"{name}.{option}={value}")
    return outside


def check_places(places: Iterable[str], source: object, *, allow: bool, own: Collection[str] = ()) -> None:
    """Refuse places outside of a run's directory that its own configuration names, unless the user allows it.

    :raises ConfigError: with the first place, and the flag that allows it.
    """
    if not allow and (refused := [place for place in places if place not in own]):
        raise ConfigError(
            f"{source} lets a tracker or the engine reach outside of the run directory: {refused[0]}. If you want "
            "that, add --allow-outside (in Python: allow_outside=True)"
        )


def _is_inside(value: object, directory: Path) -> bool:
    """Whether a value is the path of something in a directory; an address such as http://... is not."""
    text = str(value)
    return "://" not in text and "\0" not in text and Path(text).resolve().is_relative_to(directory.resolve())
