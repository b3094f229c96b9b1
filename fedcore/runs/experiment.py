"""A whole run: prepare, train round by round, evaluate, record, checkpoint, finish; and go on after a stop."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from fedcore.base.config import RunConfig
from fedcore.base.errors import FedcoreError, RunDirectoryError
from fedcore.client.frozen import load_state
from fedcore.data import Partition
from fedcore.models import SplitModel
from fedcore.models.placement import Placement, resolve_device
from fedcore.runs import participation
from fedcore.runs.checkpoint import Report
from fedcore.runs.directory import RunDirectory
from fedcore.runs.evaluation import Evaluator
from fedcore.runs.opened import OpenedRun
from fedcore.runs.provenance import now, session
from fedcore.runs.resolve import ResolvedRun
from fedcore.runs.start import Make, begin, federation, reopen
from fedcore.runs.times import RoundTimes, has_times, per_round
from fedcore.runs.trackers.following import tracked
from fedcore.server.context import ScopeContext
from fedcore.server.federation import Federation
from fedcore.server.post_train import run_post_train
from fedcore.server.round import Notify, run_round
from fedcore.server.scope import ServerScope
from fedcore.server.state import ServerState
from fedcore.storage.files import finite, sealed

UNFINISHED = (
    "the run was finished, as its summary.json says, but its last checkpoint is missing or damaged: what follows the "
    "one before it is computed again"
)


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    :param metrics: final figures by protocol, as in ``summary.json``.
    :param model: the global model, on the CPU, in eval mode.
    :param directory: the run directory.
    """

    metrics: dict[str, Any]
    model: SplitModel
    directory: Path
    summary: dict[str, Any]


class Interrupted(FedcoreError):
    """Ctrl-C: the run stopped with a checkpoint that it can go on from."""


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
            if not begun:  # the engine could not be started: nothing to go on with
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
    :param allow_code: import what its configuration names as ``module:...``; the directory may be a stranger's.
    :param allow_outside: let its trackers write, and its engine connect, where its configuration says, outside of the
        directory.
    :param engine: as in :func:`run`.
    :param changes: options of :data:`fedcore.runs.start.CHANGEABLE` with other values from here on, recorded in
        config.yaml. With more rounds the bits are those of a run of so many if no method looks at their number.
    :param out: go on in this new directory, with a copy; ``path`` stays as it is.
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


class Experiment:
    """One run under way."""

    def __init__(self, federation: Federation, directory: RunDirectory, notify: Notify) -> None:
        self.federation, self.directory, self.notify = federation, directory, notify
        self.config = federation.config
        self.evaluator = Evaluator(federation)
        self._touched: set[int] = set()  # since the last checkpoint
        self._latest: dict[str, Any] | None = None
        self._times = RoundTimes()
        self._began = time.perf_counter()

    def train(self, state: ServerState) -> RunResult:
        """Run what is left of the run."""
        try:
            while state.phase == "train":
                state = self.one_round(state)
            if state.phase == "post_train":
                state = self.post_train(state)
            return self.finish(state)
        except KeyboardInterrupt:
            self.notify("stopped", {})
            raise Interrupted(f"interrupted. Go on with: {self.directory.how_to_resume}") from None

    def one_round(self, state: ServerState) -> ServerState:
        """Run, evaluate and record one round; returns the committed state."""
        saved = state
        try:
            result = run_round(self.federation, state, self.notify)
        except BaseException:
            self.checkpoint(saved)  # what is committed stays, whatever became of this round
            raise
        state = result.state
        last = state.round == self.config.rounds
        state = replace(state, phase="post_train" if last else "train")
        began = time.perf_counter()
        metrics = None
        if last or state.round % self.config.eval_every == 0:
            every = self.config.silhouette_every
            metrics = self.evaluator.evaluate(state, with_silhouette=bool(every) and state.round % every == 0)
            state = replace(state, best=self.evaluator.best(state, metrics))
        self._latest = metrics
        seconds = {**result.seconds, "evaluation": time.perf_counter() - began}
        record = {**result.record, "metrics": metrics, **self.reports(state), "time": seconds}
        state = replace(state, metrics_bytes=self.directory.append_metrics(record))
        self.federation.setup.plugins.call_all("round_end", server=self._after(state), record=record)
        self._touched.update(record["cohort"])
        began = time.perf_counter()
        if last or state.round % self.config.checkpoint_every == 0:
            self.checkpoint(state)
        self._times.add({**seconds, "checkpoint": time.perf_counter() - began})  # too late for the record
        self.notify("round", record)
        return state

    def post_train(self, state: ServerState) -> ServerState:
        """Run every ``post_train``; returns the committed state."""
        before = self._latest or self.evaluator.evaluate(state)
        after, failures, ignored = run_post_train(self.federation, state)
        changed = any(not torch.equal(after.model[name], tensor) for name, tensor in state.model.items())
        if changed or failures or ignored:
            record = {"phase": "post_train", "failures": failures, "ignored": ignored, "bytes": after.ledger}
            after = replace(after, metrics_bytes=self.directory.append_metrics(record))
        after = replace(after, phase="done")
        if changed:
            self._latest = None
            after = replace(after, before_correction=before["global"])
        self.checkpoint(after)
        return after

    def finish(self, state: ServerState) -> RunResult:
        """Write the model and the summary."""
        metrics = self.final_metrics(state)
        self.directory.write_model(state.model)
        summary = {
            "run_dir": str(self.directory.path),
            "plugins": list(self.config.plugins),
            "rounds": state.round,
            "seconds": time.perf_counter() - self._began,
            "finished": now(),
            "metrics": metrics,
            "bytes": {**state.ledger, "per_round": per_round(state.ledger, state.round)},
            "time": self._times.split(self.federation.engine.workers),
        }
        summary |= self.reports(state)
        if self.config.system is not None:
            summary["system"] = participation.totals(self.directory.read_metrics())
        earlier = self.directory.read_summary()
        if earlier and not self._times.rounds and has_times(earlier, summary):  # then, and it still holds
            summary.update({name: earlier[name] for name in ("seconds", "time", "finished") if name in earlier})
        summary = sealed(finite(summary), self.directory.mark)
        self.directory.write_summary(summary)
        self.notify("done", summary)
        model = Placement.plain().model(self.federation.setup.model).eval()
        load_state(model.state_dict(), state.model)
        return RunResult(metrics, model, self.directory.path, summary)

    def final_metrics(self, state: ServerState) -> dict[str, Any]:
        """Return all protocols with the silhouette, the best by validation and the figures before a correction."""
        metrics = self._latest if self._latest is not None else self.evaluator.evaluate(state)
        if "silhouette" not in metrics:
            metrics = {**metrics, **self.evaluator.silhouette(state)}
        if state.before_correction is not None:
            metrics = {**metrics, "global_before_correction": state.before_correction}
        return {**metrics, "best_by_validation": state.best or None}

    def reports(self, state: ServerState) -> dict[str, Any]:
        """Return what plugins report after the last committed round, as an entry of a record; none where none do."""
        found = self.federation.setup.plugins.each("report", server=self._after(state))
        reports = {plugin.name: dict(values) for plugin, values in found if values is not None}
        return {"reports": reports} if reports else {}

    def _after(self, state: ServerState) -> ScopeContext:
        """Return the server as hooks see it after the last committed round."""
        return ScopeContext(ServerScope(self.federation, state, state.round - 1, "report"))

    def checkpoint(self, state: ServerState) -> None:
        """Save a state that is committed, its clients' states first, and drop what it makes superfluous."""
        self.directory.checkpoint(state, self._touched)
        self._touched.clear()


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
    """Return what hands sentences for people to a run's listener."""
    return lambda message: (notify or _silent)("note", {"message": message})


def _only_notes(event: str, details: Mapping[str, Any]) -> None:
    """Tell a caller who listens to nothing what people should know: that a tracker was switched off."""
    if event == "note":
        warnings.warn(details["message"], RuntimeWarning, stacklevel=2)


def _silent(event: str, details: Mapping[str, Any]) -> None:
    """Take no notice."""
