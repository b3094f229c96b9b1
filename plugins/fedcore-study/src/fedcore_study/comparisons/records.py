"""Records of runs, read without changes: of a running, stopped or damaged run as far as they are whole."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcore import RunConfig, RunDirectoryError
from fedcore.base.files import RecordFile, parse_json, parse_record, refuse_links
from fedcore.base.identity import digest
from fedcore.runs.records import further, lost
from fedcore.runs.saved import SavedConfig, partition_digest
from fedcore_study.comparisons.fairness import Spread, spread_of
from fedcore_study.comparisons.model_size import ModelSize, model_size
from fedcore_study.lenient import mapping_in, number
from fedcore_study.sweeps.directory import STUDY, SweepDirectory

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Evaluation:
    """One protocol's accuracy, in [0, 1], after a number of rounds that cost some bytes down and up together.

    :param virtual: seconds on the clock of the simulated system; None without one.
    """

    rounds: int
    accuracy: float
    bytes: int
    virtual: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One run's records.

    :param partition: hash of who holds which samples; ``labels`` that of the training labels they were split by.
    :param rounds: lines of metrics.jsonl, one per round. ``summary`` is None before the run is finished.
    :param sessions: lines of sessions.jsonl, one per process that trained it. ``changes``: of its options when it was
        resumed, as config.yaml has them.
    """

    path: Path
    config: RunConfig
    partition: str
    labels: str
    rounds: list[dict[str, Any]]
    summary: dict[str, Any] | None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    changes: Sequence[Mapping[str, Any]] = ()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary is not None

    @cached_property
    def model(self) -> ModelSize | None:
        """The model's size, where the run recorded it or has left its model."""
        return model_size(self.path, self.sessions)

    @cached_property
    def protocols(self) -> list[str]:
        """The protocols that this run has figures for."""
        found = dict(self.summary["metrics"]) if self.summary else {}
        for line in self.rounds:
            found.update(line.get("metrics") or {})
        return sorted(name for name, row in found.items() if isinstance(row, dict) and "accuracy" in row)

    def curve(self, protocol: str) -> list[Evaluation]:
        """Return the protocol's accuracy over the rounds in which it was evaluated."""
        found, spent = [], 0
        for line in self.rounds:
            spent += line["bytes"]["down"] + line["bytes"]["up"]
            row = _row(line.get("metrics") or {}, protocol)
            if row:
                found.append(Evaluation(line["round"] + 1, row["accuracy"], spent, number(line.get("virtual_time"))))
        return found

    def final(self, protocol: str) -> Evaluation | None:
        """Return the last word of a finished run, corrections after training included."""
        if self.summary is None:
            return None
        row = _row(self.summary["metrics"], protocol)
        spent = self.summary["bytes"]
        time = number(self.rounds[-1].get("virtual_time")) if self.rounds else None
        return Evaluation(self.summary["rounds"], row["accuracy"], spent["down"] + spent["up"], time) if row else None

    def spread(self, protocol: str, rounds: int | None) -> Spread | None:
        """Return how a protocol's accuracy is spread over the clients, at the end or after ``rounds`` rounds."""
        row = _row(self._metrics(rounds), protocol)
        return None if row is None else spread_of(row)

    def reported(self, name: str, rounds: int | None) -> float | None:
        """Return a number that a plugin reported, ``PLUGIN.NAME``, at the end or after ``rounds`` rounds."""
        plugin, _, figure = name.partition(".")
        records = [self.summary or {}] if rounds is None else [r for r in self.rounds if r["round"] + 1 == rounds]
        found = [record.get("reports", {}).get(plugin, {}).get(figure) for record in records]
        return next((float(value) for value in found if isinstance(value, int | float)), None)

    def at(self, protocol: str, rounds: int | None) -> Evaluation | None:
        """Return the accuracy after ``rounds`` rounds, the final one for None; None where there is none."""
        if rounds is None:
            return self.final(protocol)
        return next((point for point in self.curve(protocol) if point.rounds == rounds), None)

    def metrics(self, protocol: str, rounds: int | None) -> dict[str, float | None]:
        """Return the metrics next to accuracy and loss at the end or after ``rounds`` rounds; None if not defined."""
        row = mapping_in(self._metrics(rounds), protocol)
        return {name: number(row[name]) for name in further(row)}

    def _metrics(self, rounds: int | None) -> Mapping[str, Any]:
        if rounds is None:
            return self.summary["metrics"] if self.summary else {}
        return next((line.get("metrics") or {} for line in self.rounds if line["round"] + 1 == rounds), {})

    def reached(self, protocol: str, target: float, rounds: int | None) -> Evaluation | None:
        """Return the first evaluation with at least the target's accuracy, not after ``rounds``."""
        end = self.at(protocol, rounds)
        points = [point for point in self.curve(protocol) if rounds is None or point.rounds <= rounds]
        return next((point for point in [*points, *([end] if end else [])] if point.accuracy >= target), None)

    def seconds_per_round(self, rounds: int | None) -> float | None:
        """Return the median time of a round with its evaluation; the first round also starts processes."""
        times = (line.get("time") or {} for line in self.rounds[:rounds])
        spent = [time["round"] + time.get("evaluation", 0.0) for time in times if "round" in time]
        return statistics.median(spent) if spent else None


def find_runs(paths: Iterable[Path], warn: Warn) -> list[RunRecord]:
    """Read run directories, and all runs of sweep directories, searches too; one that is named twice counts once.

    A warning names a sweep's runs that failed, and those that have not begun. An empty folder beside others, such as a
    run leaves that is killed before it begins, is left out with a warning.

    :raises RunDirectoryError: a path is neither, or a run's files are damaged beyond a half-written last line.
    """
    found, seen = list[RunRecord](), set[Path]()
    paths = list(paths)
    for path in paths:
        if SweepDirectory.is_one(path):
            folders = _begun(SweepDirectory(path), warn)
        elif (path / STUDY).is_file():
            warn(f"{path} is a search by Optuna: its trials differ in options, of which --by OPTION makes rows")
            folders = [run.path for run in _trials(path.resolve())]
        elif len(paths) > 1 and path.is_dir() and not any(path.iterdir()):
            warn(f"{path} is empty and left out: its run was killed before it began")
            folders = []
        else:
            folders = [path.resolve()]
        for folder in folders:
            if folder not in seen:
                seen.add(folder)
                found.append(read_run(folder, warn))
    return found


def _begun(sweep: SweepDirectory, warn: Warn) -> list[Path]:
    """Return the directories of a sweep's runs that have left something to read."""
    standing = {name: sweep.standing(name) for name in sweep.plan()}
    failed = {name: why for name, how in standing.items() if how != "finished" and (why := sweep.failure(name))}
    if failed:
        warn(f"runs that failed: {', '.join(failed)}. The first: {next(iter(failed.values()))}")
    if waiting := [name for name, how in standing.items() if how == "waiting" and name not in failed]:
        warn(f"{len(waiting)} planned runs have not begun and are left out: {', '.join(waiting)}")
    return [sweep.run_directory(name) for name, how in standing.items() if how != "waiting"]


def _trials(path: Path) -> Iterable[RunRecord]:
    """Return a search's trials; of several with the same options one, finished where one is."""
    found: dict[str, RunRecord] = {}
    for folder in sorted((path / "runs").glob("trial-*")):
        if (folder / "config.yaml").is_file():
            run = read_run(folder, lambda message: None)
            same = digest(run.config)
            if same not in found or (run.finished and not found[same].finished):
                found[same] = run
    return found.values()


def read_run(path: Path, warn: Warn) -> RunRecord:
    """Read one run directory.

    :raises RunDirectoryError: there is no run in it, or its partition file is missing or damaged.
    :raises ConfigError: its config.yaml holds what this fedcore does not know.
    """
    file = path / "config.yaml"
    if not os.path.lexists(file):
        what = "does not exist" if not path.exists() else "is neither a run nor a sweep: it has no config.yaml"
        hint = f"For all runs in it, name {os.path.relpath(path)}/*" if any(path.glob("*/config.yaml")) else ""
        raise RunDirectoryError(f"{path} {what}. {hint or 'Name folders that train or sweep printed.'}")
    refuse_links(path, deep=False)
    saved = SavedConfig.read(file)
    partition, labels = _hashes(path / "partition.json", saved)
    rounds = list(_rounds(path / "metrics.jsonl", warn))
    summary, sessions = _summary(path, warn), RecordFile(path / "sessions.jsonl").read(warn)
    return RunRecord(path, saved.config(path), partition, labels, rounds, summary, sessions, saved.history)


def _hashes(file: Path, saved: SavedConfig) -> tuple[str, str]:
    try:
        content = parse_json(file.read_bytes())
        found = partition_digest(str(content["sha256"]), content["info"])
        if found != saved.partition:
            raise ValueError("it is not the one that config.yaml was written with")
        return str(content["sha256"]), str(content["info"].get("labels_sha256", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{file} is missing or damaged ({type(error).__name__}: {error})") from None


def _rounds(file: Path, warn: Warn) -> Iterator[dict[str, Any]]:
    """Yield the lines of rounds up to the first that is not whole."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for count, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = parse_record(text)
            if "round" in line:  # other lines are about what comes after training
                _check(line)
                yield line
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            where = "is half written" if count == len(lines) else f"is damaged ({type(error).__name__}: {error})"
            warn(f"{file}: line {count} {where}; read up to it")
            return


def _check(line: Mapping[str, Any]) -> None:
    """Look at what is used of a line; raises KeyError or TypeError."""
    _check_counts(line["round"], line["bytes"]["down"], line["bytes"]["up"])
    _check_metrics(line["metrics"] or {})
    if "failures" in line:
        lost(line)
    time = line.get("time") or {}
    for part in ("round", "evaluation"):
        _check_number(time.get(part, 0.0))


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    if not isinstance(metrics, dict):
        raise TypeError(f"metrics are a {type(metrics).__name__}")
    for row in metrics.values():
        if isinstance(row, dict) and "accuracy" in row:
            _check_number(row["accuracy"])


def _row(metrics: Mapping[str, Any], protocol: str) -> Mapping[str, Any] | None:
    """Return a protocol's figures, None where there are none."""
    row = mapping_in(metrics, protocol)
    return row if "accuracy" in row else None


def _check_counts(*values: Any) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TypeError(f"{value!r:.40} is no count")


def _check_number(value: Any) -> None:
    if number(value) is None:
        raise TypeError(f"{value!r:.40} is no number")


def _summary(path: Path, warn: Warn) -> dict[str, Any] | None:
    file = path / "summary.json"
    try:
        summary = parse_record(file.read_bytes())
        _check_metrics(summary["metrics"])
        _check_counts(summary["bytes"]["down"], summary["bytes"]["up"], summary["rounds"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn(f"{file} is damaged ({type(error).__name__}: {error}); the run counts as not finished")
        return None
    return dict(summary)
