"""A run's config.yaml, and the binding of its files: the configuration, the partition and the content of the data set.

``config.yaml`` and every checkpoint carry a digest of each, so that an exchanged or damaged file is detected. Options
without an effect on the bits (:data:`fedcore.base.identity.WITHOUT_EFFECT`) are not bound: a run can be resumed with
another number of workers or another data directory. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcore.base.config import RunConfig
from fedcore.base.errors import RunDirectoryError
from fedcore.base.identity import WITHOUT_EFFECT
from fedcore.base.safe_yaml import write_yaml
from fedcore.storage.config_file import BESIDE_OPTIONS, read_mapping
from fedcore.storage.files import write_text

HOW_TO_CHANGE = (
    "Put back what it was. A change that is wanted is an option of fedcore resume, such as --rounds; any other is "
    "a new run: fedcore train --config FILE --out NEW_FOLDER"
)


@dataclass(frozen=True)
class Binding:
    """The settings, partition and data that the files of one run agree on.

    :param settings: every option that can change the run's bits, as plain values.
    :param partition: digest of who holds which samples; ``data`` of the samples.
    :param changes: changes made on purpose when the run was resumed, oldest first: the round, and by option
        the values before and after.
    """

    settings: Mapping[str, Any]
    partition: str
    data: str
    changes: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def digests(self) -> dict[str, str]:
        """Return what config.yaml carries."""
        return {"settings": settings_digest(self.settings), "partition": self.partition, "data": self.data}

    def plain(self) -> dict[str, Any]:
        """Return what a checkpoint carries."""
        return {"settings": dict(self.settings), "partition": self.partition, "data": self.data}

    def changed(self, settings: Mapping[str, Any], round: int, noted: Mapping[str, tuple[Any, Any]]) -> Binding:
        """Return the binding after a change on purpose.

        :param noted: option -> values before and after.
        """
        entry = {"round": round, **{name: list(values) for name, values in noted.items()}}
        return replace(self, settings=bound(settings), changes=[*self.changes, entry])

    def differences(self, other: Any) -> list[str]:
        """Return in words what a checkpoint's binding has otherwise; none for one of before
        a recorded change.

        :param other: what :meth:`plain` gave; another thing is damaged.
        """
        if not isinstance(other, dict) or not isinstance(other.get("settings"), dict):
            return ["the checkpoint's own record of what it belongs to, which is damaged"]
        found = [_differing(settings, other["settings"]) for settings in self._earlier()]
        differing = [] if [] in found else found[0]
        for name, what in (
            ("partition", "who holds which samples (partition.json)"),
            ("data", "the data set's content"),
        ):
            if getattr(self, name) != other.get(name):
                differing.append(what)
        return differing

    @property
    def mark(self) -> str:
        """What goes into the checksums of this run's records, so that no other's fit: the settings as it was begun."""
        return settings_digest([*self._earlier()][-1])

    def _earlier(self) -> Iterator[dict[str, Any]]:
        """Yield the settings, and those before each change, newest first."""
        settings = dict(self.settings)
        yield dict(settings)
        for change in reversed(self.changes):
            settings.update({name: values[0] for name, values in change.items() if name in settings})
            yield dict(settings)


@dataclass(frozen=True)
class ConfigFile:
    """What a run writes into its config.yaml.

    :param values: the options; ``versions`` what the run was begun with.
    """

    values: Mapping[str, Any]
    binding: Binding
    versions: Mapping[str, Any]

    @classmethod
    def of(cls, config: RunConfig, partition: str, data: str, versions: Mapping[str, Any]) -> ConfigFile:
        """Return the file of a new run; ``partition`` and ``data`` are digests, see :class:`Binding`."""
        values = config.model_dump(mode="json")
        return cls(values, Binding(bound(values), partition, data), versions)

    def changed(self, changes: Mapping[str, tuple[Any, Any]], round: int) -> ConfigFile:
        """Return the file after options were changed on purpose: by option the values before and after."""
        values = {**self.values, **{name: after for name, (_, after) in changes.items()}}
        return replace(self, values=values, binding=self.binding.changed(values, round, changes))

    def write(self, path: Path) -> None:
        """Write the file.

        :raises ValueError: a text has no form in UTF-8, so that it could not be read back.
        :raises StorageError: it cannot be written.
        """
        content = {**self.values, "digests": self.binding.digests()}
        content |= {"changes": [dict(entry) for entry in self.binding.changes]} if self.binding.changes else {}
        content["versions"] = dict(self.versions)
        json.dumps(content, ensure_ascii=False).encode()
        write_text(path, write_yaml(content), inside=path.parent)


@dataclass(frozen=True)
class SavedConfig:
    """A run's config.yaml, as it was read.

    :param values: its options as they stand there.
    :param digests: of settings, partition and data.
    """

    config: RunConfig
    values: Mapping[str, Any]
    digests: Mapping[str, str]
    changes: Sequence[Mapping[str, Any]]
    versions: Mapping[str, Any]

    @property
    def mark(self) -> str:
        """See :attr:`Binding.mark`."""
        return Binding(bound(self.values), "", "", self.changes).mark


def read_saved(file: Path, out: Path, *, was: Callable[[], Any] = lambda: None) -> SavedConfig:
    """Read a run's own config.yaml, which has to be as whole as it was written.

    :param out: the run directory, wherever it was when it was written.
    :param was: gives a checkpoint's binding, from which a change is named.
    :raises RunDirectoryError: options are missing, or differ from what was written.
    :raises ConfigError: it cannot be read, or holds what this fedcore does not know.
    """
    content = read_mapping(file)
    digests, changes, versions = (content.get(name) for name in ("digests", "changes", "versions"))
    values = {name: value for name, value in content.items() if name not in BESIDE_OPTIONS}
    if not values.keys() <= RunConfig.model_fields.keys():
        RunConfig.create(values, source=str(file))  # says which it does not know
    if not (isinstance(digests, dict) and set(digests) == {"settings", "partition", "data"}):
        raise RunDirectoryError(f"{file} is damaged: its digests are not whole. {HOW_TO_CHANGE}")
    if not _are_changes(changes):
        raise RunDirectoryError(f"{file} is damaged: its list of changes is none. {HOW_TO_CHANGE}")
    if digests["settings"] != settings_digest(bound(values)):
        missing = sorted(set(RunConfig.model_fields) - set(values))
        if missing:
            names = f"{', '.join(missing[:4])}{f' and {len(missing) - 4} others' if len(missing) > 4 else ''}"
            raise RunDirectoryError(f"{file} is not whole: it lacks {names}. {HOW_TO_CHANGE}")
        then = was()
        settings = then.get("settings") if isinstance(then, dict) else None
        found = _differing(bound(values), settings) if isinstance(settings, dict) else []
        raise RunDirectoryError(
            f"{file} was changed since it was written{': ' + '; '.join(found) if found else ''}. {HOW_TO_CHANGE}"
        )
    config = RunConfig.create({**values, "out": str(out)}, source=str(file))
    return SavedConfig(config, values, digests, changes or (), versions if isinstance(versions, dict) else {})


def bound(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a run's bits depend on."""
    return {name: value for name, value in values.items() if name not in WITHOUT_EFFECT}


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of plain values; the order inside a setting counts, that of the settings does not."""
    return hashlib.sha256(json.dumps(sorted(settings.items())).encode()).hexdigest()


def partition_digest(sha256: str, info: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of a partition: of the hash of its index lists, and of how it was made."""
    return hashlib.sha256(json.dumps([sha256, info], sort_keys=True).encode()).hexdigest()


def _differing(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Return in words which settings differ."""
    names = [name for name in sorted({*now, *then}) if now.get(name, now) != then.get(name, then)]

    def value(settings: Mapping[str, Any], name: str) -> str:
        return f"{settings[name]!r:.60}" if name in settings else "nothing"

    return [f"{name} is {value(now, name)}, the checkpoint was written with {value(then, name)}" for name in names]


def _are_changes(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(
            isinstance(entry, dict)
            and all(name == "round" or (isinstance(pair, list) and len(pair) == 2) for name, pair in entry.items())
            for entry in value
        )
    )
