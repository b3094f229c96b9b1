"""Evidence gathered from runs and sweeps into a folder such as ``results/``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedcore import ConfigError, FedcoreError, RunConfig
from fedcore.tools import method
from fedcore_reproduce.evidence import Evidence, Place, evidence_of, read_evidence, write_evidence
from fedcore_reproduce.places import Cells, comparable, differences, nearest, places_of
from fedcore_study.tools import RunRecord, Warn, find_runs


@dataclass(frozen=True)
class Collected:
    """The files that were written, the files that were kept because they hold more rounds, and the refused runs."""

    written: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    refused: list[Path] = field(default_factory=list)


def collect(paths: Iterable[Path], root: Path, among: Cells, *, warn: Warn, only_tables: bool = False) -> Collected:
    """Write the evidence of runs, also of runs in progress, under each table that they belong to.

    A run whose records contradict themselves, or whose options this installation does not know, is refused.

    :param among: the cells of the tables.
    :param warn: also takes the reason why a run is refused.
    :param only_tables: leave out runs that belong to no cell, instead of writing them to ``runs/``.
    :raises RunDirectoryError: a path holds no run and no sweep, or a damaged one.
    """
    collected = Collected()
    for run in find_runs(paths, warn):
        if not run.rounds:
            warn(f"{run.path}: no round is recorded yet; it is left out")
            continue
        try:
            places: Sequence[Place | None] = places_of(run.config, among)
            if not places and not only_tables:
                _tell_nearest(run, among, warn)
                places = [None]
            evidence = [evidence_of(run, place, warn) for place in places]
        except FedcoreError as error:
            warn(f"{run.path}: {error}; it is left out")
            collected.refused.append(run.path)
            continue
        for each in evidence:
            file = root / each.folder / each.file_name
            if _says_more(file, each, warn):
                collected.kept.append(file)
            else:
                collected.written.append(write_evidence(each, root))
    return collected


def changed_since(evidence: Evidence, among: Cells) -> str:
    """Return the options in which a run differs from today's recipe of its table; empty if there are none."""
    if evidence.place is None or evidence.place not in among:
        return ""
    try:
        return _in_words(differences(comparable(RunConfig.create(evidence.config)), among[evidence.place]))
    except FedcoreError as error:
        return f"its configuration is not one of this fedcore ({error})"


def _tell_nearest(run: RunRecord, among: Cells, warn: Warn) -> None:
    hint = ""
    if close := nearest(run.config, among):
        place, others = close
        hint = f"; nearest is {place.folder}, {place.row}, {place.column}, but for {_in_words(others)}"
    name = f"{run.path} ({method(run.config.plugins)}, seed {run.config.seed})"
    warn(f"{name} belongs to no table of a paper{hint}")


def _in_words(others: Mapping[str, tuple[object, object]]) -> str:
    parts = [f"{name} {ours} (in the recipe {wanted})" for name, (ours, wanted) in list(others.items())[:5]]
    return ", ".join(parts) + (f" and {len(others) - 5} other options" if len(others) > 5 else "")


def _says_more(file: Path, evidence: Evidence, warn: Warn) -> bool:
    """Return whether the file exists already and holds more rounds of the same run."""
    if not file.is_file():
        return False
    try:
        stored = read_evidence(file)
    except ConfigError as error:
        warn(f"{error}; it is replaced")
        return False
    if stored.identity != evidence.identity or stored.partition != evidence.partition:
        warn(f"{file} was of another configuration; it is replaced")
        return False
    if (stored.is_finished, stored.rounds) > (evidence.is_finished, evidence.rounds):
        warn(f"{file} is kept: it holds {stored.rounds} rounds, the run {evidence.rounds}")
        return True
    return False
