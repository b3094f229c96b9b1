"""The records of runs, for reading. Those of a running, stopped or damaged run are read up to the first damage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedcore import FedcoreError, RunConfig, RunDirectoryError
from fedcore.tools import PROTOCOLS, digest, files, method, protocols, registry, saved, settings, short_name
from fedcore.tools import rounds as recorded
from fedcore_study.lenient import list_in, mapping_in, number
from fedcore_study.runs.labels import read_labels
from fedcore_study.sweeps.directory import ASKED, SEARCH, STUDY, SweepDirectory

Warn = Callable[[str], None]

ACCURACY = "accuracy"

OVER_CLIENTS = " (clients)"
"""The end of the name of a metric's mean over the clients."""

NO_SIGNS: Mapping[str, int] = MappingProxyType({})
"""Of runs whose task is classification."""


@dataclass(frozen=True)
class Evaluation:
    """One protocol's figure after a number of rounds."""

    rounds: int
    value: float
    """The accuracy in [0, 1], or the first figure of a task without accuracy."""
    bytes: int
    """Sent down and up until then."""
    virtual: float | None
    """Seconds on the clock of the simulated system; None without one."""


@dataclass(frozen=True)
class ModelSize:
    """The size of a run's model."""

    parameters: int
    """The number of trainable parameters."""
    projection: int | None
    """The width of the projection head; None without one."""

    def __str__(self) -> str:
        head = "no projection head" if self.projection is None else "a projection head"
        return f"{self.parameters:,} parameters and {head}"


@dataclass(frozen=True)
class RunRecord:
    """One run's records."""

    path: Path
    config: RunConfig
    partition: str
    """A hash of the partition."""
    labels: str
    """A hash of the training labels by which the samples were split."""
    rounds: list[dict[str, Any]]
    """The lines of metrics.jsonl, one per round."""
    summary: dict[str, Any] | None
    """None until the run is finished."""
    sessions: list[dict[str, Any]]
    """The lines of sessions.jsonl, one per process that trained the run."""
    changes: Sequence[Mapping[str, Any]]
    """The changes of options with which the run was resumed, as config.yaml has them."""
    data: str = ""
    """A hash of the data set as it was loaded: samples, labels and domains."""
    searched: Sequence[str] = ()
    """The options that a search tried, if this run is a trial: ``lr``, ``moon.mu``."""
    compared: str = ""
    """The figure by which the run is compared, if one was asked for."""
    lent: bool = False
    """Whether the figures under ``personal`` are the global model's; see :func:`with_global_model`."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary is not None

    @cached_property
    def title(self) -> str:
        """The run's name, or the name of its method if it has none."""
        name = read_labels(self.path, {"name": self.config.name}).name
        return name or method({short_name(plugin): {} for plugin in settings(self.config)["plugins"]})

    @property
    def model(self) -> ModelSize | None:
        """The model's size as the last session recorded it."""
        size = mapping_in(self.sessions[-1], "model") if self.sessions else {}
        parameters = size.get("parameters")
        return ModelSize(parameters, size.get("projection")) if isinstance(parameters, int) else None

    @property
    def plugin_notes(self) -> list[Any]:
        """What the run's plugins found in its set-up, such as layers that are never trained."""
        return list_in(self.sessions[-1], "notes") if self.sessions else []

    @property
    def client_names(self) -> list[Any]:
        """The names of the clients, such as hospitals; empty if they have none."""
        return list_in(self.sessions[-1], "clients") if self.sessions else []

    def client(self, number: str) -> str:
        """Return a client's name, such as a hospital's; without names ``client 3``."""
        names = self.client_names
        known = number.isdecimal() and int(number) < len(names)
        return str(names[int(number)]) if known else f"client {number}"

    @property
    def sources(self) -> Iterator[tuple[str, str]]:
        """The hashes of the code of the run's methods and of the user's own code by name, in each session."""
        for session in self.sessions:
            for name, value in mapping_in(session, "versions").items():
                if name.startswith(saved.SOURCE) or registry.is_code(name):
                    yield name, str(value)

    @cached_property
    def signs(self) -> Mapping[str, int]:
        """The figures of the run's task, if it has no accuracy: 1 if more is better, -1 if less is, 0 if neither is."""
        task = mapping_in(self.sessions[-1], "task") if self.sessions else {}
        return {str(name): value if value in (-1, 0) else 1 for name, value in mapping_in(task, "signs").items()}

    @property
    def figure(self) -> str:
        """The name of the figure by which the run is compared: accuracy, or the first of its task."""
        return self.compared or next(iter(self.signs), ACCURACY)

    @cached_property
    def protocols(self) -> list[str]:
        """The protocols that this run has figures for."""
        rows = dict(self.summary["metrics"]) if self.summary else {}
        for line in self.rounds:
            rows.update(mapping_in(line, "metrics"))
        return sorted(name for name, row in rows.items() if isinstance(row, dict) and self.figure in row)

    def curve(self, protocol: str) -> list[Evaluation]:
        """Return the protocol's figure over the rounds in which it was evaluated, and is defined."""
        evaluations, spent = [], 0
        for line in self.rounds:
            spent += line["bytes"]["down"] + line["bytes"]["up"]
            value = number(mapping_in(mapping_in(line, "metrics"), protocol).get(self.figure))
            if value is not None:
                evaluations.append(Evaluation(line["round"] + 1, value, spent, number(line.get("virtual_time"))))
        return evaluations

    def final(self, protocol: str) -> Evaluation | None:
        """Return the figure of a finished run at its end, corrections after training included."""
        value = number(self.figures(protocol, None).get(self.figure))
        if self.summary is None or value is None:
            return None
        spent = self.summary["bytes"]
        time = number(self.rounds[-1].get("virtual_time")) if self.rounds else None
        return Evaluation(self.summary["rounds"], value, spent["down"] + spent["up"], time)

    def reported(self, name: str, rounds: int | None) -> float | None:
        """Return a number that a plugin reported, ``PLUGIN.NAME``, at the end or after ``rounds`` rounds."""
        plugin, _, figure = name.partition(".")
        return number(mapping_in(self.reports(rounds), plugin).get(figure))

    def reports(self, rounds: int | None) -> Mapping[str, Any]:
        """Return what plugins reported at the end or after ``rounds`` rounds, by plugin."""
        return mapping_in(self._record(rounds), "reports")

    def at(self, protocol: str, rounds: int | None) -> Evaluation | None:
        """Return the figure after ``rounds`` rounds, for None at the end; None if it was not measured."""
        if rounds is None:
            return self.final(protocol)
        return next((point for point in self.curve(protocol) if point.rounds == rounds), None)

    def metrics(self, protocol: str, rounds: int | None) -> dict[str, float | None]:
        """Return the metrics next to accuracy and loss at the end or after ``rounds`` rounds; None if not defined.

        For a protocol that clients measure, ``NAME`` is of all samples together, ``NAME (clients)`` the clients' mean.
        """
        row = self.figures(protocol, rounds)
        figures: dict[str, float | None] = {}
        for name in protocols.further(row):
            figures[name] = number(row[name])
            if PROTOCOLS[protocol].on_clients:
                figures[f"{name}{OVER_CLIENTS}"] = number(row.get(f"{name}_mean"))
        return figures

    def figures(self, protocol: str, rounds: int | None) -> Mapping[str, Any]:
        """Return all figures of a protocol at the end or after ``rounds`` rounds; empty if it was not measured."""
        return mapping_in(mapping_in(self._record(rounds), "metrics"), protocol)

    def _record(self, rounds: int | None) -> Mapping[str, Any]:
        """Return the summary, or the line after ``rounds`` rounds; empty without one."""
        if rounds is None:
            return self.summary or {}
        return next((line for line in self.rounds if line["round"] + 1 == rounds), {})

    def reached(self, protocol: str, target: float, rounds: int | None) -> Evaluation | None:
        """Return the first evaluation that is as good as the target or better, not after ``rounds``."""
        end = self.at(protocol, rounds)
        points = [point for point in self.curve(protocol) if rounds is None or point.rounds <= rounds]
        sign = next(iter(self.signs.values()), 1)
        good = (point for point in [*points, *([end] if end else [])] if sign * point.value >= sign * target)
        return next(good, None)


def with_global_model(run: RunRecord, protocol: str) -> RunRecord:
    """Return a run of a method without own models with its global model's figures under ``personal``.

    These are on the same samples (``global_local``). Other runs are returned as they are.
    """
    if protocol != "personal" or protocol in run.protocols or "global_local" not in run.protocols:
        return run

    def lend(record: dict[str, Any]) -> dict[str, Any]:
        metrics = mapping_in(record, "metrics")
        return {**record, "metrics": {**metrics, protocol: metrics.get("global_local")}}

    rounds, summary = [lend(line) for line in run.rounds], lend(run.summary) if run.summary else None
    return replace(run, rounds=rounds, summary=summary, lent=True)


def find_runs(paths: Iterable[Path], warn: Warn) -> list[RunRecord]:
    """Read run directories, and all runs of sweeps and searches. A run that is named twice counts once.

    Warnings name a sweep's runs that failed, and those that have not begun. A run that is killed before it begins
    leaves an empty folder. Next to other paths it is left out with a warning.

    :raises RunDirectoryError: a path is neither, or a run's files are damaged beyond a half-written last line.
    """
    runs: dict[Path, RunRecord] = {}
    paths = list(paths)
    for path in paths:
        if SweepDirectory.is_one(path):
            folders = _begun(SweepDirectory(path), warn)
        elif (path / STUDY).is_file():
            runs |= {run.path: run for run in _trials(path.resolve(), warn)}
            folders = []
        elif len(paths) > 1 and path.is_dir() and not any(path.iterdir()):
            warn(f"{path} is empty and left out: its run was killed before it began")
            folders = []
        else:
            folders = [path.resolve()]
        for folder in folders:
            if folder not in runs:
                runs[folder] = _read_among(folder, warn, alone=len(paths) == len(folders) == 1)
    return list(runs.values())


def _read_among(folder: Path, warn: Warn, *, alone: bool) -> RunRecord:
    """Read a run; if it cannot be read, the error says how to go on with the others, if there are any."""
    try:
        return read_run(folder, warn)
    except FedcoreError as error:
        if alone:
            raise
        way_out = f"To go on without this run, move {folder} away, or name the other folders alone"
        raise RunDirectoryError(f"{str(error).removesuffix('.')}. {way_out}") from error


def _begun(sweep: SweepDirectory, warn: Warn) -> list[Path]:
    """Return the directories of a sweep's runs that have begun."""
    standing = {name: sweep.standing(name) for name in sweep.plan()}
    failed = {name: why for name, how in standing.items() if how != "finished" and (why := sweep.failure(name))}
    if failed:
        warn(f"runs that failed: {', '.join(failed)}. The first: {next(iter(failed.values()))}")
    if waiting := [name for name, how in standing.items() if how == "waiting" and name not in failed]:
        warn(f"planned runs that have not begun are left out: {len(waiting)}. The first: {waiting[0]}")
    return [sweep.run_directory(name) for name, how in standing.items() if how != "waiting"]


def _trials(path: Path, warn: Warn) -> Iterable[RunRecord]:
    """Return a search's trials. Of several with the same options it is one, a finished one if there is one."""
    trials: dict[str, RunRecord] = {}
    searched = _searched(path / STUDY)
    for folder in sorted((path / "runs").glob("trial-*")):
        if (folder / "config.yaml").is_file():
            run = replace(read_run(folder, warn), searched=searched)
            same = digest(run.config)
            if same not in trials or (run.finished and not trials[same].finished):
                trials[same] = run
    return trials.values()


def _searched(study: Path) -> list[str]:
    """Return the options that a search tries, as its study has them; empty if it is damaged there."""
    for line in study.read_bytes().splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            if asked := mapping_in(mapping_in(files.parse_json(line), "user_attr"), ASKED):
                return [name.removeprefix(SEARCH) for name in asked if name.startswith(SEARCH)]
    return []


def read_run(path: Path, warn: Warn) -> RunRecord:
    """Read one run directory.

    :raises RunDirectoryError: there is no run in it, or its partition file is missing or damaged.
    :raises ConfigError: its config.yaml has options or values that this fedcore does not know.
    """
    file = path / "config.yaml"
    if not os.path.lexists(file):
        problem = "does not exist" if not path.exists() else "is neither a run nor a sweep: it has no config.yaml"
        hint = f"For all runs in it, name {os.path.relpath(path)}/*" if any(path.glob("*/config.yaml")) else ""
        raise RunDirectoryError(f"{path} {problem}. {hint or 'Name folders that train or sweep printed.'}")
    files.refuse_links(path, deep=False)
    own = saved.SavedConfig.read(file)
    partition, labels = _hashes(path / "partition.json", own)
    rounds = list(_rounds(path / "metrics.jsonl", warn))
    summary, sessions = _summary(path, warn), files.RecordFile(path / "sessions.jsonl").read(warn)
    return RunRecord(path, own.config(path), partition, labels, rounds, summary, sessions, own.history, own.data)


def _hashes(file: Path, own: saved.SavedConfig) -> tuple[str, str]:
    try:
        content = files.parse_json(file.read_bytes())
        partition = saved.partition_digest(str(content["sha256"]), content["info"])
        if partition != own.partition:
            raise ValueError("it is not the one that config.yaml was written with")
        return str(content["sha256"]), str(content["info"].get("labels_sha256", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{file} is missing or damaged ({type(error).__name__}: {error})") from None


def _rounds(file: Path, warn: Warn) -> Iterator[dict[str, Any]]:
    """Yield the lines of rounds up to the first damaged one."""
    lines = files.RecordFile(file).content().split(b"\n")
    for count, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = files.parse_record(text)
            if "round" in line:  # other lines are from after the training
                _check(line)
                yield line
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            where = "is half written" if count == len(lines) else f"is damaged ({type(error).__name__}: {error})"
            warn(f"{file}: line {count} {where}; read up to it")
            return


def _check(line: Mapping[str, Any]) -> None:
    """Check the values of a line that comparisons use.

    :raises KeyError: or TypeError, or AttributeError: a value is missing or of another type.
    """
    _check_counts(line["round"], line["bytes"]["down"], line["bytes"]["up"])
    _check_metrics(line["metrics"] or {})
    if "failures" in line:
        recorded.lost(line)
    time = line.get("time") or {}
    _check_numbers(time.get("round", 0.0), time.get("evaluation", 0.0))


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    _check_numbers(*(row[ACCURACY] for row in metrics.values() if isinstance(row, dict) and ACCURACY in row))


def _check_counts(*values: Any) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TypeError(f"{value!r:.40} is no count")


def _check_numbers(*values: Any) -> None:
    for value in values:
        if number(value) is None:
            raise TypeError(f"{value!r:.40} is no number")


def _summary(path: Path, warn: Warn) -> dict[str, Any] | None:
    file = path / "summary.json"
    try:
        summary = files.parse_record(file.read_bytes())
        _check_metrics(summary["metrics"])
        _check_counts(summary["bytes"]["down"], summary["bytes"]["up"], summary["rounds"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn(f"{file} is damaged ({type(error).__name__}: {error}); the run counts as not finished")
        return None
    return dict(summary)
