"""Run, resume or evaluate an experiment: the functions that Python programs and the command line call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from fedcore.base.config import RunConfig
from fedcore.base.errors import RunDirectoryError
from fedcore.data import Partition
from fedcore.models.placement import resolve_device
from fedcore.runs.checkpoint import Report
from fedcore.runs.opened import OpenedRun
from fedcore.runs.provenance import session
from fedcore.runs.resolve import ResolvedRun
from fedcore.runs.start import Make, begin, federation, reopen
from fedcore.runs.trackers.following import tracked
from fedcore.runs.training import Experiment, Interrupted, RunResult
from fedcore.server.round import Notify
from fedcore.server.state import ServerState

__all__ = ["Experiment", "Interrupted", "RunResult", "evaluate_run", "go_on", "one_thread", "resume", "run", "started"]

UNFINISHED = (
    "the run was finished, as its summary.json says, but its last checkpoint is missing or damaged: what follows the "
    "one before it is computed again"
)


def run(
    config: RunConfig | ResolvedRun,
    *,
    notify: Notify | None = None,
    engine: Make | None = None,
    partition: Partition | None = None,
) -> RunResult:
    """Train as configured, in a new run directory.

    :param partition: who holds which samples, in place of the configured dealing. A :meth:`Partition.declared` one is
        of clients that hold data of their own; ``engine`` has to reach them.
    :param engine: makes the engine in place of the configured one; for engines that are objects of the caller's.
    :param notify: called with an event's name and details (``start``, ``client``, ``round``, ``done``).
    :raises ConfigError: and its kin, before anything is written.
    :raises RoundFailedError: too few usable updates; the directory holds the last good state.
    :raises Interrupted: Ctrl-C; the directory holds a checkpoint.
    """
    with started(config, notify=notify, engine=engine, partition=partition) as (experiment, state):
        return experiment.train(state)


@contextmanager
def started(
    config: RunConfig | ResolvedRun,
    *,
    notify: Notify | None = None,
    engine: Make | None = None,
    partition: Partition | None = None,
) -> Iterator[tuple[Experiment, ServerState]]:
    """Prepare a run in a new run directory and start its engine; for callers that go round by round."""
    with one_thread():
        opened = begin(config, partition, reached=engine is not None)
        begun = False
        try:
            with opened.directory.lock():
                initial = opened.initial()
                with _running(opened, initial, notify, engine) as experiment:
                    begun = True
                    yield experiment, initial
        except BaseException:
            if not begun:  # the engine could not be started: there is nothing to resume
                opened.directory.discard()
            raise


def resume(
    path: Path,
    *,
    notify: Notify | None = None,
    allow_code: bool = False,
    allow_outside: bool = False,
    engine: Make | None = None,
    changes: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> RunResult:
    """Go on with a run from its last checkpoint, with the same options and to the same bits.

    A checkpoint that is damaged, or names a client's state that is, is passed over for the one before it.

    :param notify: as in :func:`run`; also called with ``note`` and its ``message``.
    :param allow_code: import what its configuration names as ``module:...``; do so for a directory that you trust.
    :param allow_outside: let its trackers write, and its engine connect, where its configuration says, outside of the
        directory.
    :param engine: as in :func:`run`.
    :param changes: options of :data:`fedcore.runs.start.CHANGEABLE` with other values from here on, recorded in
        config.yaml. With more rounds the bits are those of a run of so many if no method looks at their number.
    :param out: copy the run to this new directory and resume the copy; ``path`` stays unchanged.
    :raises RunDirectoryError: there is no run in ``path``, none of its checkpoints is whole, its files do not belong
        together, or it is being trained.
    :raises ConfigError: it needs one of the permissions.
    """
    with one_thread():
        opened = reopen(
            path,
            allow_code=allow_code,
            allow_outside=allow_outside,
            reached=engine is not None,
            changes=changes,
            out=out,
        )
        return go_on(opened, notify=notify, engine=engine)


def go_on(opened: OpenedRun, *, notify: Notify | None = None, engine: Make | None = None) -> RunResult:
    """Train what is left of a reopened run; see :func:`resume`."""
    report = _notes(notify)
    with one_thread(), opened.directory.lock():
        _tell(opened, report)
        finished = opened.directory.read_summary(report) is not None
        state = opened.recover(report) or opened.initial()
        if finished and state.phase != "done" and not opened.changed:
            report(UNFINISHED)
        opened.record_changes(state)
        with _running(opened, state, notify, engine) as experiment:
            return experiment.train(state)


def evaluate_run(path: Path, *, notify: Notify | None = None, allow_code: bool = False) -> dict[str, Any]:
    """Recompute the metrics of a run's last checkpoint; writes nothing.

    :param notify: called with ``note`` and its message where a damaged checkpoint was passed over.
    :param allow_code: as for :func:`resume`.
    :raises RunDirectoryError: there is no checkpoint.
    """
    with one_thread():
        opened, report = reopen(path, allow_code=allow_code), _notes(notify)
        _tell(opened, report)
        state = opened.directory.checkpoints.load(report=report)
        if state is None:
            raise RunDirectoryError(f"{path} has no checkpoint yet; first run: {opened.directory.how_to_resume}")
        opened.check(state)
        recorded = sum("round" in record for record in opened.directory.read_metrics())
        if state.phase != "done" and opened.directory.read_summary(report) is not None:
            report(UNFINISHED)
        elif recorded > state.round:
            report(
                f"{recorded} rounds are recorded, and the last checkpoint is of {state.round}: that one is evaluated"
            )
        with federation(opened) as running:
            return Experiment(running, opened.directory, _silent).final_metrics(state)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as everything must that reaches weights or state; undone at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _running(opened: OpenedRun, state: ServerState, notify: Notify | None, make: Make | None) -> Iterator[Experiment]:
    notify = notify or _only_notes
    opened.directory.add_session(session(opened.setup.model, resolve_device(opened.config.device)))
    notify(
        "start",
        {
            "directory": opened.directory.path,
            "config": opened.config,
            "round": state.round,
            "notes": opened.partition.info["notes"],
        },
    )
    with (
        tracked(opened.config, opened.directory.path, notify) as notify,
        federation(opened, make) as running,
    ):
        yield Experiment(running, opened.directory, notify)


def _tell(opened: OpenedRun, report: Report) -> None:
    for note in opened.notes:
        report(note)


def _notes(notify: Notify | None) -> Report:
    """Return a message callback that calls ``notify``."""
    return lambda message: (notify or _silent)("note", {"message": message})


def _only_notes(event: str, details: Mapping[str, Any]) -> None:
    """Tell a caller that passed no ``notify``, for example that a tracker was switched off."""
    if event == "note":
        warnings.warn(details["message"], RuntimeWarning, stacklevel=2)


def _silent(event: str, details: Mapping[str, Any]) -> None:
    """Ignore all events."""
