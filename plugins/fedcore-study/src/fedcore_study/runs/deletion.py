"""Delete runs, or what is left of them once their results are known."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedcore import ConfigError, RunDirectoryError
from fedcore.base.files import refuse_links, storing
from fedcore_study.runs.overview import Overview, Warn

STATES = ("checkpoint", "clients")
"""The folders of a run that only a resume, an evaluation and the clients' own models need."""


@dataclass(frozen=True)
class Removal:
    """What would be deleted of one run."""

    run: Overview
    names: tuple[str, ...]
    """Folders in the run's directory; empty for the whole directory."""
    bytes: int

    @property
    def what(self) -> str:
        """What is deleted, in words."""
        return " and ".join(f"{name}/" for name in self.names) or "the whole run"


def whole(run: Overview, *, certain: bool = False) -> Removal:
    """Return the removal of a run with everything in its directory.

    :param certain: refuse a run on a file system that does not tell whether a process trains it.
    :raises RunDirectoryError: a process trains the run, or its directory holds links.
    """
    refuse_links(run.path)
    if run.path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(f"{run.path} is the current folder or above it; change to another folder first")
    with _held(run.path, certain=certain):
        return Removal(run, (), size(run.path))


def without_loss(runs: Iterable[Overview], warn: Warn) -> Iterator[Removal]:
    """Yield what can be deleted without losing a result.

    This is all of a stopped run without a finished round, and the states in a finished run's directory.

    :param warn: called with a message about a run that is left as it is.
    """
    for run in runs:
        try:
            if run.state == "broken":
                warn(f"{run.folder} is left as it is: {run.problem}")
            elif run.state == "stopped" and not run.done:
                yield whole(run, certain=True)
            elif run.state == "finished" and (names := [name for name in STATES if (run.path / name).is_dir()]):
                refuse_links(run.path)
                yield Removal(run, tuple(names), sum(size(run.path / name) for name in names))
        except RunDirectoryError as error:
            warn(f"{run.folder} is left as it is: {error}")


def delete(removal: Removal) -> None:
    """Delete the files, while no process can train the run.

    :raises RunDirectoryError: a process began to train the run meanwhile.
    :raises StorageError: a file cannot be deleted.
    """
    path = removal.run.path
    with _held(path), storing(path):
        for name in removal.names:
            shutil.rmtree(path / name)
        if not removal.names:
            shutil.rmtree(path)


def size(path: Path) -> int:
    """Return the bytes of all files in a folder, or of a file."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


@contextlib.contextmanager
def _held(path: Path, *, certain: bool = False) -> Iterator[None]:
    """Keep other processes from training a run. The parameters and errors are as for :func:`whole`."""
    with storing(path):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"a process trains {path}; stop it first") from None
        except OSError as error:  # a network file system that cannot lock folders
            if certain:
                raise RunDirectoryError(f"{path} cannot be locked, so a process may train it") from error
        yield
    finally:
        os.close(descriptor)
