"""A sweep's directory: the plan of all its runs, and where each of them stands. Imports no torch.

``sweep.yaml`` (the grid that was asked for last), ``sweep.json`` (every run ever planned, by name),
``runs/NAME`` (a run directory each), ``logs/NAME.log``, ``logs/NAME.failed`` (why, if it failed).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from fedcore import FedcoreError, RunConfig, RunDirectoryError
from fedcore.tools import digest, files, saved
from fedcore_study.schedules import follows_rounds

Standing = Literal["finished", "stopped", "waiting"]

FORMAT = "fedcore-sweep-1"

STUDY = "study.log"
"""The file in a folder of ``sweep --optuna``, whose runs are trials."""

ASKED = "asked"
"""The study's attribute with the options that were asked for."""

SEARCH = "--search "
"""What the names of the searched options begin with there."""


def new_folder() -> Path:
    """Return the folder of a sweep for which nobody names one: ``sweeps/`` and the time."""
    return Path("sweeps") / f"{datetime.datetime.now():%Y%m%d-%H%M%S}"


class SweepDirectory:
    """Paths and files of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether a folder holds a sweep."""
        return (path / "sweep.json").is_file()

    @property
    def spec_file(self) -> Path:
        """The grid that was asked for last."""
        return self.path / "sweep.yaml"

    def run_directory(self, name: str) -> Path:
        """Where a run is kept."""
        return self.path / "runs" / name

    def log_file(self, name: str) -> Path:
        """What a run's process printed."""
        return self.path / "logs" / f"{name}.log"

    def failure(self, name: str) -> str:
        """Return why a run failed when it was last tried; empty if it did not."""
        try:
            return self._failure_file(name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def keep_failure(self, name: str, why: str) -> None:
        """Keep why a run failed: one that fails in its first round leaves no run directory. Empty forgets it."""
        if why:
            files.write_text(self._failure_file(name), why)
        else:
            self._failure_file(name).unlink(missing_ok=True)

    def _failure_file(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.failed"

    def standing(self, name: str, rounds: int | None = None) -> Standing:
        """Return how far a run is.

        :param rounds: a finished run that was to have fewer rounds counts as stopped.
        """
        folder = self.run_directory(name)
        if (folder / "summary.json").is_file():
            return "finished" if rounds is None or _has_rounds(folder, rounds) else "stopped"
        return "stopped" if (folder / "config.yaml").is_file() else "waiting"

    def plan(self) -> dict[str, RunConfig]:
        """Return every planned run by name, in the order in which they were planned.

        :raises RunDirectoryError: there is no sweep, or its plan is damaged.
        """
        file = self.path / "sweep.json"
        try:
            content = files.parse_json(file.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise RunDirectoryError(f"{file} has format {content['format']!r}; this fedcore reads {FORMAT!r}")
            runs = dict(content["runs"])
            for name, values in runs.items():
                if not name or _safe(name) != name or not isinstance(values, dict):  # names become folders
                    raise ValueError(f"{name!r} is no run of a sweep")
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.path} holds no sweep: it has no sweep.json") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(f"{file} is damaged: {type(error).__name__}: {error}") from None
        return {name: RunConfig.create(values, source=f"{file}, run {name}") for name, values in runs.items()}

    def extended(
        self, runs: Iterable[tuple[str, RunConfig]], rounds: int | None = None
    ) -> tuple[dict[str, RunConfig], list[str]]:
        """Return the plan with more runs, and the names of those that are asked for. Nothing is written.

        Parameters and errors are as for :meth:`add`.
        """
        plan = self.plan() if self.is_one(self.path) else {}
        if not plan and self.path.is_dir() and any(path.name != ".lock" for path in self.path.iterdir()):
            raise RunDirectoryError(f"--out {self.path} exists already and holds no sweep; choose another directory")
        names = _extend(plan, runs)
        if rounds is not None:
            fewer = [(name, config) for name, config in plan.items() if config.rounds < rounds]
            names += _extend(plan, [(name, config.model_copy(update={"rounds": rounds})) for name, config in fewer])
        return plan, list(dict.fromkeys(names))

    def add(self, spec: str, runs: Iterable[tuple[str, RunConfig]], rounds: int | None = None) -> list[str]:
        """Plan runs, and return their names here; one that is planned already keeps its name and place.

        It gets the new options without an effect on its results. A planned run that is not among the new ones, and
        differs from one of these in nothing but fewer rounds, gets the rounds of the new one. If its training
        follows the number of rounds, the new one is a run of its own.

        :param runs: readable names, from which the folders' names are made, with configurations.
        :param rounds: everything that was ever planned gets at least so many rounds, and is asked for.
        :raises RunDirectoryError: the folder holds something else.
        :raises StorageError: the folder cannot be written.
        """
        plan, names = self.extended(runs, rounds)
        with files.storing(self.path):
            for folder in ("runs", "logs"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        values = {name: config.model_dump(mode="json") for name, config in plan.items()}
        files.write_text(self.spec_file, spec)
        files.write_json(self.path / "sweep.json", {"format": FORMAT, "runs": values})
        return names

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other sweeps out of this directory until the block ends.

        :raises RunDirectoryError: another one is at work, or there is a link in the folder.
        :raises StorageError: the folder cannot be made.
        """
        for folder in (self.path, self.path / "runs", self.path / "logs"):
            if folder.is_dir():
                files.refuse_links(folder, deep=False)
        with files.storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            opened = (self.path / ".lock").open("a")
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirectoryError(
                    f"another sweep is at work in {self.path}; wait for it, or choose another --out"
                ) from None
            except OSError:  # a network file system that cannot lock files
                pass
            yield


def _extend(plan: dict[str, RunConfig], runs: Iterable[tuple[str, RunConfig]]) -> list[str]:
    """Add runs to a plan, as :meth:`SweepDirectory.add` says; returns the name of each."""
    known = {digest(config): name for name, config in plan.items()}
    shorter = _by_all_but_rounds(plan)
    names: list[str] = []
    asked = [(digest(config), label, config) for label, config in runs]
    taken = {known[identity] for identity, _, _ in asked if identity in known}
    for identity, label, config in asked:
        if identity not in known:
            candidates = shorter.get(_all_but_rounds(config), [])
            name = next((n for n in candidates if n not in taken and plan[n].rounds < config.rounds), "")
            if not name or follows_rounds(config):
                name = f"{_file_name(label)}_{identity[:8]}"
                if name in plan:  # it has more rounds since
                    name = f"{_file_name(f'{label} rounds={config.rounds}')}_{identity[:8]}"
            known[identity] = name
            taken.add(name)
        plan[known[identity]] = config
        names.append(known[identity])
    return names


def _by_all_but_rounds(plan: Mapping[str, RunConfig]) -> dict[str, list[str]]:
    """Return the names of the runs by what makes a run except its rounds, the longest first."""
    names: dict[str, list[str]] = {}
    for name, config in sorted(plan.items(), key=lambda item: -item[1].rounds):
        names.setdefault(_all_but_rounds(config), []).append(name)
    return names


def _all_but_rounds(config: RunConfig) -> str:
    return digest(config.model_copy(update={"rounds": RunConfig.model_fields["rounds"].default}))


def _has_rounds(folder: Path, rounds: int) -> bool:
    """Return whether a finished run was to have so many rounds; with --patience it may have had fewer."""
    try:
        if int(files.parse_json((folder / "summary.json").read_text(encoding="utf-8"))["rounds"]) >= rounds:
            return True
        return int(saved.SavedConfig.read(folder / "config.yaml").values["rounds"]) >= rounds
    except (OSError, FedcoreError, KeyError, TypeError, ValueError):
        return False  # damaged, as resuming it says


def _file_name(label: str) -> str:
    return _safe(_safe(label)[:100])


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.,+=-]+", "_", text).strip("._")
