"""Delete runs, or their checkpoints and states once their results are known. Only fedcore's own files are deleted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedcore import RunDirectoryError
from fedcore.tools import files
from fedcore_study.runs.overview import Overview, Warn, checkpoints, read_overview, read_rounds

STATES = ("checkpoint", "clients")
"""The folders of a run that only a resume, an evaluation and the clients' own models need."""

_BEGINNING = r"config\.yaml | partition\.json | partition-[0-9a-f]{16}\.safetensors"
"""The files that a run's directory has from its beginning."""

_FILES = rf"""
    {_BEGINNING} | (metrics|sessions)\.jsonl | (summary|labels)\.json | model(-best(-next)?)?\.safetensors
    | checkpoint/[0-9]{{6,}}-[0-9]-[a-z_]+\.safetensors | clients/[0-9]{{6,}}/[0-9]{{6,}}\.safetensors
    | clients/together/[0-9]{{6,}}-[0-9a-f]{{8}}\.bundle
    | trackers/[A-Za-z0-9._-]+\.(json|log|lock) | tensorboard/events\.out\.tfevents\.[^/]+
    | wandb/(latest-run | settings | debug[a-z-]*\.log | (offline-)?run-[^/]+/.+)
"""
_FOLDERS = (
    r"checkpoint | clients(/([0-9]{6,}|together))? | trackers | tensorboard | wandb(/(offline-)?run-[^/]+(/.+)?)?"
)
"""What fedcore and its trackers write into a run's directory, as paths below it."""


@dataclass(frozen=True)
class Removal:
    """What would be deleted of one run."""

    run: Overview
    names: tuple[str, ...]
    """Folders in the run's directory; empty for the whole directory."""
    entries: tuple[os.DirEntry[str], ...] = field(compare=False)
    """All that is deleted. What is in a folder precedes it."""
    bytes: int
    certain: bool
    """Nobody named the run: it stays if it is not certain that no process trains it, and that it holds no state."""

    @property
    def what(self) -> str:
        """What is deleted, in words."""
        return " and ".join(f"{name}/" for name in self.names) or "the whole run"


def whole(run: Overview) -> Removal:
    """Return the removal of a run that the user named, with everything in its directory.

    :raises RunDirectoryError: a process trains the run; it has checkpoints, but no records; its directory is the
        current one, holds links, or holds something that fedcore did not write.
    """
    with _held(run.path):
        return _removal(run)


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
                with _held(run.path, certain=True):
                    removal = _removal(run, certain=True)
                yield removal
            elif run.state == "finished" and (names := [name for name in STATES if (run.path / name).is_dir()]):
                yield _removal(run, names)
        except RunDirectoryError as error:
            warn(f"{run.folder} is left as it is: {error}")


def delete(removal: Removal) -> None:
    """Delete the files, while no process can train the run.

    :raises RunDirectoryError: a process trains the run, or the run has changed since the removal was made.
    :raises StorageError: a file cannot be deleted.
    """
    path = removal.run.path
    with _held(path, certain=removal.certain):
        if read_overview(path, removal.run.folder, held=True) != removal.run:
            raise RunDirectoryError("it is not as it was shown: another process has gone on with it or changed it")
        entries = _removal(removal.run, removal.names, certain=removal.certain).entries
        with files.storing(path):
            for entry in entries:
                (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry)
            for name in removal.names or ("",):
                os.rmdir(path / name)


def delete_beginning(path: Path) -> None:
    """Delete the directory of a process that was killed before it had written its run's config.yaml.

    :raises RunDirectoryError: something else is in it.
    :raises StorageError: a file cannot be deleted.
    """
    files.refuse_links(path)
    entries = _entries(path)
    _refuse_others(path, entries, _BEGINNING, "")
    with files.storing(path):
        for entry in entries:
            os.unlink(entry)
        os.rmdir(path)


def size(path: Path) -> int:
    """Return the bytes of all files in a folder, or of a file."""
    if not path.is_dir():
        return path.lstat().st_size
    return _size(_entries(path))


def _removal(run: Overview, names: Sequence[str] = (), *, certain: bool = False) -> Removal:
    """Return the removal of a run, or of the folders ``names`` in it. Errors are as for :func:`whole`.

    :param certain: see :attr:`Removal.certain`.
    """
    path = run.path
    files.refuse_links(path)
    entries = [entry for name in names or ("",) for entry in _entries(path / name)]
    if names:
        _require_results(run)
    elif path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise RunDirectoryError(f"{path} is the current folder or above it; change to another folder first")
    elif checkpoints(path) and not read_rounds(path).done:
        raise RunDirectoryError(
            f"{path} has checkpoints, but no records of rounds, so nobody knows what would be lost. Put metrics.jsonl "
            "back, or delete the folder yourself"
        )
    elif certain and any(_entries(path / name) for name in STATES if (path / name).is_dir()):
        raise RunDirectoryError("it has no finished round, but states in checkpoint/ or clients/; runs rm deletes it")
    _refuse_others(path, entries, _FILES, _FOLDERS)
    return Removal(run, tuple(names), tuple(entries), _size(entries), certain)


def _require_results(run: Overview) -> None:
    """Refuse to delete the states of a finished run whose records or model they could bring back.

    :raises RunDirectoryError: names the file that is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open  # here: lists and helps do without it

    done = read_rounds(run.path).done
    if done != run.done:
        raise RunDirectoryError(f"metrics.jsonl records {done} rounds of {run.done}")
    model = run.path / "model.safetensors"
    try:
        with safe_open(model, "numpy"):  # reads the header, which has to fit the file's length
            pass
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"{model.name} is missing or damaged ({error}); a resume writes it again") from None


def _refuse_others(path: Path, entries: Iterable[os.DirEntry[str]], pattern: str, folders: str) -> None:
    """Refuse a folder with something that fedcore did not write.

    :param pattern: of the files that fedcore wrote, as paths below ``path``. They may be incomplete.
    :param folders: the same of folders.
    """
    others = set()
    for entry in entries:
        name = Path(entry.path).relative_to(path).as_posix()
        if entry.is_dir(follow_symlinks=False):
            known = re.fullmatch(folders, name, re.VERBOSE)
        else:
            written = re.sub(rf"(^|/)\.([^/]+)\.[0-9]+{re.escape(files.TEMPORARY)}$", r"\1\2", name)
            known = re.fullmatch(pattern, written, re.VERBOSE)
        if not known:
            others.add(name)
    if others:
        named = sorted(name for name in others if os.path.dirname(name) not in others)
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        raise RunDirectoryError(f"{path} holds what fedcore did not write there: {named[0]}{more}; move it away")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, at any depth. The entries of a folder precede it.

    The files by which a folder is known as a run come last, for a deletion that is cut short.
    """
    entries: list[os.DirEntry[str]] = []
    waiting = [os.fspath(folder)]
    while waiting:
        with files.storing(folder), os.scandir(waiting.pop()) as inside:
            for entry in inside:
                entries.append(entry)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    last = {os.path.join(folder, name) for name in ("partition.json", "config.yaml")}
    entries.reverse()
    return sorted(entries, key=lambda entry: entry.path in last)


def _size(entries: Iterable[os.DirEntry[str]]) -> int:
    return sum(
        entry.stat(follow_symlinks=False).st_size for entry in entries if not entry.is_dir(follow_symlinks=False)
    )


@contextlib.contextmanager
def _held(path: Path, *, certain: bool = False) -> Iterator[None]:
    """Keep other processes from training a run.

    :param certain: refuse a run on a file system that cannot lock folders.
    :raises RunDirectoryError: a process trains the run.
    """
    with files.storing(path):
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
