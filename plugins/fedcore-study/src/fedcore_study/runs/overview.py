"""One line about each run below a folder, from a few small files; of an unfinished run also from metrics.jsonl."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fedcore import FedcoreError, RunDirectoryError
from fedcore.tools import PROTOCOLS, StorageError, files, method, nearest, protocols, safe_yaml, short_name
from fedcore.tools import rounds as recorded
from fedcore_study.lenient import count, mapping_in, number
from fedcore_study.runs.labels import Labels, read_labels
from fedcore_study.words import shown

State = Literal["finished", "stopped", "running", "broken"]
STATES: tuple[State, ...] = get_args(State)

RUNS, SWEEPS = Path("runs"), Path("sweeps")
"""The folders in which ``train`` makes its run directories, and ``sweep`` its folders."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C: the loader in Python would take 10 s for 1,000 runs."""

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Overview:
    """One run in a line."""

    path: Path
    folder: str
    """The directory below the listed folder, without the level ``runs`` of sweeps."""
    state: State
    problem: str = ""
    """Why the run is broken."""
    begun: datetime.datetime | None = None
    method: str | None = None
    dataset: str | None = None
    seed: int | None = None
    done: int = 0
    planned: int | None = None
    protocol: str | None = None
    """The protocol of the accuracy: the first one that the run measured."""
    accuracy: float | None = None
    """After the last evaluated round, from 0 to 1; of a finished run the final one."""
    figure: str | None = None
    """The same with its name and unit; of a task without accuracy its first figure: ``rmse 45.4``."""
    labels: Labels = field(default_factory=Labels)

    @property
    def title(self) -> str:
        """The name, or the folder of a run without a name."""
        return self.labels.name or self.folder

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "path": str(self.path),
            "folder": self.folder,
            **asdict(self.labels),
            "state": self.state,
            "problem": self.problem or None,
            "begun": self.begun.isoformat() if self.begun else None,
            "method": self.method,
            "dataset": self.dataset,
            "seed": self.seed,
            "rounds": self.done,
            "planned": self.planned,
            "protocol": self.protocol,
            "accuracy": self.accuracy,
            "figure": self.figure,
        }


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run, be it damaged: a config.yaml, and the partition or the records."""
    return os.path.lexists(path / "config.yaml") and any(
        os.path.lexists(path / name) for name in ("partition.json", "metrics.jsonl")
    )


def find_runs(folder: Path, warn: Warn) -> list[Overview]:
    """Return the runs in a folder and in the folders below it, such as sweeps, by path. Links are not followed.

    :param warn: called with a message about folders that cannot be read.
    :raises RunDirectoryError: there is no such folder. The folder of ``train`` may be missing: there is no run yet.
    """
    if not folder.is_dir():
        if folder == RUNS and not folder.exists():
            return []
        raise RunDirectoryError(f"there is no folder {folder}. Name one: fedcore runs list FOLDER")
    if is_run(folder):
        return [read_overview(folder, folder.absolute().name)]
    return [read_overview(path, label_of(path, folder)) for path in _walk(folder, warn)]


def find_usual_runs(warn: Warn) -> list[Overview]:
    """Return the runs in the folders of ``train`` and ``sweep``; runs of sweeps are called ``sweeps/...``."""
    runs = find_runs(RUNS, warn)
    if SWEEPS.is_dir():
        runs += [read_overview(path, label_of(path, Path())) for path in _walk(SWEEPS, warn)]
    return runs


def _walk(folder: Path, warn: Warn) -> Iterator[Path]:
    """Yield the runs below a folder by path, without hidden folders."""

    def unreadable(error: OSError) -> None:
        warn(f"{error.filename} cannot be read: {error.strerror}")

    for place, names, _ in os.walk(folder, onerror=unreadable):
        if is_run(Path(place)):
            yield Path(place)
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))


def label_of(path: Path, folder: Path) -> str:
    """Return how a run below a folder is called: ``sweep/moon_seed=0`` for ``sweep/runs/moon_seed=0``."""
    parts = path.relative_to(folder).parts
    return "/".join([*(part for part in parts[:-1] if part != "runs"), parts[-1]])


def find_run(text: str) -> Overview:
    """Return the run that a path means, or that the beginning of its name or folder in ``runs list`` means alone.

    :raises RunDirectoryError: there is no such run, or there are several.
    """
    path, wanted = Path(text), text.removeprefix(f"{RUNS}/").rstrip("/")
    if path.is_symlink():
        raise RunDirectoryError(f"{text} is a link, to {os.readlink(path)}; name the folder itself")
    if is_run(path):
        return read_overview(path, label_of(path, RUNS) if path.is_relative_to(RUNS) else path.absolute().name)
    runs = find_usual_runs(lambda message: None) if wanted else []
    names = {run.path: {run.title, run.folder, run.path.name} for run in runs}
    matches = [run for run in runs if wanted in names[run.path]]
    if wanted and not matches and path.is_dir():
        raise RunDirectoryError(f"{text} holds no run, as it has no config.yaml; see: fedcore runs list {text}")
    # The beginning of a name is enough, but the name of a folder that holds no run is not the beginning of another.
    matches = matches or [run for run in runs if any(name.startswith(wanted) for name in names[run.path])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(run.folder for run in matches[:4]) + (
            f" and {len(matches) - 4} more" if len(matches) > 4 else ""
        )
        raise RunDirectoryError(f"{text!r} means {len(matches)} runs: {listed}. Write more of one folder's name")
    near = nearest(wanted, {name for several in names.values() for name in several})
    hint = f"Did you mean {near!r}?" if near else "Give a path, or a name in the table of: fedcore runs list"
    raise RunDirectoryError(f"there is no run {text!r}, neither here nor below {RUNS} or {SWEEPS}. {hint}")


def read_overview(path: Path, folder: str, *, held: bool = False) -> Overview:
    """Read one run as far as a line in a table needs it. A damaged run is ``broken``, with the reason.

    :param held: this process holds the run's lock, so no process trains it.
    """
    try:
        files.refuse_links(path, deep=False)
        options = _read_options(path / "config.yaml")
        summary = _read_summary(path / "summary.json")
        labels = read_labels(path, options)
        state: State = "finished"
        if summary is None:
            state = "running" if not held and is_locked(path) else "stopped"
        rounds = read_rounds(path) if summary is None else Rounds(summary["rounds"], summary["metrics"])
        if rounds.problem and state == "stopped":
            raise RunDirectoryError(rounds.problem)
    except FedcoreError as error:
        return Overview(path, folder, "broken", str(error), _begun(path))
    protocol, row = _main(rounds.metrics)
    plugins, dataset = options["plugins"], options["dataset"]
    return Overview(
        path,
        folder,
        state,
        begun=_begun(path),
        method=method({short_name(name): None for name in plugins}),
        dataset=shown(dataset),
        seed=count(options.get("seed")),
        done=rounds.done,
        planned=options["rounds"],
        protocol=protocol,
        accuracy=number(row.get("accuracy")),
        figure=recorded.in_short(row) if protocol else None,
        labels=labels,
    )


def is_locked(path: Path) -> bool:
    """Return whether a process trains a run. A file system that cannot lock folders does not tell.

    The question takes the lock for some microseconds, in which a resume of this run would be refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True)
class Rounds:
    """What metrics.jsonl says of a run's rounds."""

    done: int = 0
    """How many rounds it records."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The figures of the last round that was evaluated."""
    problem: str = ""
    """Why it is unknown how many rounds the run has had."""


def read_rounds(path: Path) -> Rounds:
    """Return the rounds of the run in a directory."""
    file = path / "metrics.jsonl"
    try:
        trained, content = checkpoints(path), files.RecordFile(file).content()
    except RunDirectoryError as error:
        return Rounds(problem=str(error))
    done, figures = 0, Rounds().metrics
    for line in reversed(content.split(b"\n")[:-1]):  # the rest is being written
        try:
            record = files.parse_record(line)
        except ValueError:
            continue
        round = count(record.get("round"))
        done = max(done, 0 if round is None else round + 1)
        if _main(mapping_in(record, "metrics"))[0]:
            figures = mapping_in(record, "metrics")
            break
    if not done and (content or trained):
        problem = (
            "holds no round that can be read" if content else "is missing or empty, although there are checkpoints"
        )
        return Rounds(problem=f"{file} {problem}")
    return Rounds(done, figures)


def checkpoints(path: Path) -> list[str]:
    """Return the names of a run's checkpoints, whole or damaged, without that of a run before its first round.

    :raises StorageError: the folder cannot be read.
    """
    folder = path / "checkpoint"
    try:
        return [
            name for name in os.listdir(folder) if not name.startswith("000000-") and not name.endswith(files.TEMPORARY)
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot read the folder {folder}: {error.strerror}") from None


def _main(metrics: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the first protocol with figures, and these."""
    for name in PROTOCOLS:
        row = mapping_in(metrics, name)
        if number(row.get(protocols.figure_of(row))) is not None:
            return name, row
    return None, {}


def _read_options(file: Path) -> dict[str, Any]:
    """Return the options in a config.yaml.

    :raises RunDirectoryError: the file cannot be read.
    """
    try:
        content = file.read_bytes()
        options = _parsed(content) or {}
        for name, kind in (("plugins", dict), ("dataset", str), ("rounds", int), ("digests", dict)):
            if not isinstance(options[name], kind):
                raise ValueError("an option has a value of another type")
        if not all(isinstance(name, str) for name in options["plugins"]):
            raise ValueError("a plugin's name is no text")
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise RunDirectoryError(f"{file} is no configuration of a run: {problem}") from None
    return dict(options)


def _parsed(content: bytes) -> Any:
    """Return the value of a config.yaml. A text that could hold aliases takes the slow loader, which refuses them.

    Deep nesting, for which a long text has room, would crash the loader in C.
    """
    if len(content) < 1 << 14 and not any(mark in content for mark in (b"*", b"<<")):
        return yaml.load(content, Loader=_LOADER)  # noqa: S506 - a safe loader
    return safe_yaml.read_yaml(content.decode(), plain=True)


def _read_summary(file: Path) -> dict[str, Any] | None:
    try:
        summary = files.parse_record(file.read_bytes())
        if count(summary["rounds"]) is None or not isinstance(summary["metrics"], dict):
            raise ValueError("a figure has a value of another type")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"{file} is damaged ({type(error).__name__}: {error}); a resume writes it again"
        ) from None
    return summary


def _begun(path: Path) -> datetime.datetime | None:
    """Return when the first process began to train the run, or else when its configuration was written."""
    try:
        with (path / "sessions.jsonl").open("rb") as opened:
            started = files.parse_record(opened.readline())["started"]
        return datetime.datetime.fromisoformat(started).astimezone(datetime.UTC)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        pass
    try:
        return datetime.datetime.fromtimestamp(os.lstat(path / "config.yaml").st_mtime, datetime.UTC)
    except OSError:
        return None
