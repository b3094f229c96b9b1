"""A run's labels: its name, tags and note. They may change at any time: results and checkpoints do not depend on them.

``config.yaml`` has the labels with which the run was begun. Later ones are in ``labels.json``, which then holds all
three and takes precedence.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedcore import ConfigError, RunConfig, RunDirectoryError
from fedcore.tools import LABELS, files, nearest

FILE = "labels.json"


@dataclass(frozen=True)
class Labels:
    """What people say about a run."""

    name: str | None = None
    tags: Sequence[str] = ()
    note: str | None = None

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Labels:
        """Return the labels in a mapping.

        :raises ConfigError: ``train`` refuses a value.
        """
        config = RunConfig.create({name: values[name] for name in LABELS if values.get(name) is not None})
        return cls(config.name, tuple(config.tags), config.note)

    def changed(
        self, *, add: Iterable[str] = (), remove: Iterable[str] = (), name: str | None = None, note: str | None = None
    ) -> Labels:
        """Return other labels. An empty name or note removes it; None keeps it.

        :raises ConfigError: ``train`` refuses a value.
        """
        dropped = set(remove)
        tags = [*(tag for tag in self.tags if tag not in dropped), *add]
        values = {
            "name": self.name if name is None else name,
            "tags": tags,
            "note": self.note if note is None else note,
        }
        return Labels.checked({label: value or None for label, value in values.items()})


def read_labels(directory: Path, options: Mapping[str, Any]) -> Labels:
    """Return a run's labels.

    :param options: the run's options in config.yaml.
    :raises RunDirectoryError: ``labels.json`` is damaged.
    """
    file = directory / FILE
    try:
        return Labels.checked(files.parse_record(file.read_bytes()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ConfigError) as error:
        raise RunDirectoryError(f"{file} is damaged: {error}. Delete it; config.yaml has the first labels") from None
    try:
        return Labels.checked(options)
    except ConfigError:  # somebody edited config.yaml; the caller warns of it
        return Labels()


@contextlib.contextmanager
def alone(directories: Iterable[Path]) -> Iterator[None]:
    """Wait until no other process changes the labels of these runs, and keep others from it until the block ends.

    :raises StorageError: a config.yaml cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        for directory in sorted(directories):  # two processes that take the same locks do not wait for each other
            config = directory / "config.yaml"  # the directory's own lock is the training's
            with files.storing(config):
                file = stack.enter_context(config.open("rb"))
            with contextlib.suppress(OSError):  # a network file system that cannot lock files
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_labels(directory: Path, labels: Labels) -> None:
    """Write ``labels.json``.

    :raises StorageError: the file cannot be written.
    """
    files.write_json(directory / FILE, asdict(labels))


def require_tags(tags: Iterable[str], existing: Sequence[Labels]) -> None:
    """Refuse to remove a tag that no run has.

    :raises ConfigError: with the tag that may be meant.
    """
    known = sorted({tag for labels in existing for tag in labels.tags})
    for tag in tags:
        if tag not in known:
            near = nearest(tag, known)
            having = f"the tags are {', '.join(known)}" if known else "there are no tags"
            raise ConfigError(
                f"no run here has the tag {tag!r}" + (f"; did you mean {near!r}?" if near else f"; {having}")
            )
