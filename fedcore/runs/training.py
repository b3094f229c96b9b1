"""A run in progress: round by round, evaluate, record, checkpoint, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from fedcore.base.config import TrainingOptions
from fedcore.base.errors import DivergedError, FedcoreError
from fedcore.base.files import finite
from fedcore.base.identity import judged_by
from fedcore.base.plugin_state import States
from fedcore.base.protocols import VALIDATION, confusion_key
from fedcore.base.seeding import global_digest
from fedcore.data.inputs import Inputs
from fedcore.runs.directory import RunDirectory
from fedcore.runs.evaluation import Evaluator
from fedcore.runs.progress import noting
from fedcore.runs.provenance import now
from fedcore.runs.rounds import Failures, RoundTimes, history_rows, not_evaluated, per_round, undefined
from fedcore.server.context import ScopeContext
from fedcore.server.round import Notify, run_post_train, run_round
from fedcore.server.scope import Federation, ServerScope
from fedcore.server.state import ServerState

CHECKPOINT_SECONDS = 1.0
"""How far apart checkpoints are begun unless the configuration says after how many rounds.

Next to rounds of some milliseconds one in each took a tenth of the time.
"""

OTHER_DRAWS = (
    "other code drew from a global random generator (torch's, NumPy's or Python's) during this run: another thread, a "
    "hook or a callback. This may have changed the run's numbers, so that another run with this seed has other "
    "results; let that code draw from a generator of its own"
)


OnRound = Callable[[dict[str, Any]], object]
"""Called after every round with its row of ``result.history``. The run ends after this round if it returns True.

Other values, such as the numbers that ``file.write`` and progress bars return, end nothing.
"""


class CallbackError(FedcoreError):
    """A function that the caller gave raised; its exception is the cause."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run stopped with a checkpoint from which it can go on.

    As every KeyboardInterrupt, it passes an ``except Exception`` and thus ends a loop over runs.
    """


class Experiment:
    """A run in progress.

    A thread writes a checkpoint while the next round trains. When the context ends, also with an error, a checkpoint of
    the last recorded round is on the disk.
    """

    def __init__(
        self, federation: Federation, directory: RunDirectory, notify: Notify, on_round: OnRound | None = None
    ) -> None:
        self.federation, self.directory, self.notify, self.on_round = federation, directory, notify, on_round
        self.config, self.note = federation.config, noting(notify)
        self.evaluator = Evaluator(federation, federation.config.protocols)
        self._touched: set[int] = set()  # since the last checkpoint
        self._unsaved: ServerState | None = None  # the last recorded state, until its checkpoint is being written
        self._best: ServerState | None = None  # of the best round, until its model is being written with a checkpoint
        self._latest: dict[str, Any] | None = None
        self._noted_about: set[object] = set()
        self._random: bytes | None = global_digest()  # None once other draws are noted
        self._times = RoundTimes()
        self._failures = Failures()
        self._began = time.perf_counter()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._next_checkpoint = 0.0  # without --checkpoint-every

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.save()
        finally:
            self._writer.shutdown()

    def train(self, state: ServerState) -> None:
        """Train the rest of the run.

        :raises DivergedError: also with the way back to the checkpoint before an update that made all clients diverge.
        """
        if state.phase != "done":
            self._unsaved = state  # a run that goes on with changed options needs a checkpoint that fits them
        try:
            while state.phase == "train":
                state = self.one_round(state)
            if state.phase == "post_train":
                self.save()
                state = self.post_train(state)
            self.settle()
            self.finish(state)
        except DivergedError as error:
            self.save()
            newest = self.directory.checkpoints.newest_of_two()
            if not state.outliers or newest is None:
                raise
            raise DivergedError(
                f"{error} If these clients send sound updates by now, delete {newest} to go back to the checkpoint "
                f"before it, then: {self.directory.how_to_resume}"
            ) from error
        except KeyboardInterrupt:
            self.save()
            self.notify("stopped", {})
            if not self.directory.metrics.length:
                raise Interrupted("interrupted before a round was finished") from None
            raise Interrupted(f"interrupted. Go on with: {self.directory.how_to_resume}") from None

    def one_round(self, state: ServerState) -> ServerState:
        """Run, evaluate and record one round; return the committed state, whose checkpoint is being written."""
        state, record, seconds = run_round(self.federation, state, self.notify)
        began, metrics = time.perf_counter(), None
        last = state.round == self.config.rounds
        if last or state.round % self.config.eval_every == 0:
            # The last round's figures have the confusions.
            may_end = last or self.config.patience is not None or self.on_round is not None
            metrics = self._noted(self.evaluator.evaluate(state, with_confusion=may_end))
            state = replace(state, best=self.evaluator.best(state, metrics))
            if not state.best and metrics.keys() & VALIDATION:
                figure = judged_by(self.config, self.federation.dataset.task.metrics)
                why = f"no round is the best one, for --patience or --keep best, while held-out parts give no {figure}"
                self._note_once(VALIDATION, f"{why} (round {state.round}); --best-by takes another figure")
            if self.config.keep == "best" and state.best and state.best["round"] + 1 == state.round:
                self._best = state
            if not last and out_of_patience(self.config, state):
                last, best = True, state.best["round"]
                self.note(
                    f"stopped after round {state.round}: round {best + 1} stays the best on the clients' held-out "
                    f"parts (--patience {self.config.patience})"
                )
        state = replace(state, phase="post_train" if last else "train")
        seconds["evaluation"] = time.perf_counter() - began
        return self.record(state, {**record, "metrics": metrics}, seconds)

    def record(self, state: ServerState, record: dict[str, Any], seconds: dict[str, Any]) -> ServerState:
        """Append a round's record to metrics.jsonl and begin its checkpoint; return the state to go on from."""
        if self._random not in (None, global_digest()):
            self._random = None
            self.note(OTHER_DRAWS)
        self._note_plugins(record, f", round {state.round}")
        self._latest = record["metrics"]
        self._failures.add(record)
        record = {**record, **self.reports(state), "time": seconds}
        state = replace(state, metrics_bytes=self.directory.metrics.append(record))
        self._touched.update(record["cohort"])
        self._unsaved = state
        if self.on_round is not None and self._asks_to_stop(record) and state.phase == "train":
            state = self._unsaved = replace(state, phase="post_train", stopped=True)
            self.note(f"stopped after round {state.round}: on_round returned True")
        began, every = time.perf_counter(), self.config.checkpoint_every
        # The second one waits for the first: see may_be_unsaved.
        is_due = state.round % every == 0 if every else state.round <= 2 or began >= self._next_checkpoint
        if is_due or state.phase == "post_train":
            self.checkpoint(state)
        self._times.add({**seconds, "checkpoint": time.perf_counter() - began})  # too late for the record
        self.notify("round", record)
        return state

    def _asks_to_stop(self, record: Mapping[str, Any]) -> bool:
        """Call the caller's function with the round's row; return whether it returns True, which ends the run."""
        assert self.on_round is not None
        (row,) = history_rows([record])
        try:
            ends = self.on_round(row)
            return isinstance(ends, (bool, np.bool_)) and bool(ends)  # a progress bar's or file's number ends nothing
        except Exception as error:  # a program's function can raise anything
            name = getattr(self.on_round, "__qualname__", type(self.on_round).__name__)
            raise CallbackError(
                f"on_round={name} raised {type(error).__name__} after round {row['round']}: {error}. The round is "
                f"saved; {self.directory.how_to_resume} goes on"
            ) from error

    def post_train(self, state: ServerState) -> ServerState:
        """Run every ``post_train``; return the committed state."""
        before = self._latest or self.evaluator.evaluate(state)
        after, record = run_post_train(self.federation, state)
        changed = any(not torch.equal(after.model[name], tensor) for name, tensor in state.model.items())
        if changed or record["failures"] or record["ignored"] or "notes" in record:
            after = replace(after, metrics_bytes=self.directory.metrics.append(record))
        self._note_plugins(record)
        after = replace(after, phase="done")
        if changed:
            self._latest = None
            after = replace(after, before_correction=before["global"])
        self.checkpoint(after)
        return after

    def finish(self, state: ServerState) -> None:
        """Write the model and the summary."""
        metrics, counted = self.final_metrics(state), self.evaluator.counted.items()
        self.directory.write_model(state.model, *self._file)
        summary = {
            "run_dir": str(self.directory.path),
            "plugins": list(self.config.plugins),
            "rounds": state.round,
            "seconds": time.perf_counter() - self._began,
            "finished": now(),
            "metrics": metrics,
            **{confusion_key(name): each.confusion.tolist() for name, each in counted if each.confusion is not None},
            **{f"curves_{name}": drawn for name, each in counted if (drawn := each.curves(self.evaluator.further))},
            "bytes": {**state.ledger, "per_round": per_round(state.ledger, state.round)},
            "time": self._times.split(self.federation.engine.workers),
        }
        if state.round < self.config.rounds:
            summary["stopped_early"] = {"rounds": self.config.rounds, "patience": self.config.patience}
        summary |= self.reports(state)
        if totals := self.federation.system.totals(self.directory.metrics):
            summary["system"] = totals
        earlier = self.directory.read_summary()
        if earlier and not self._times.rounds:  # no round was added since
            summary.update({name: earlier[name] for name in ("seconds", "time", "finished") if name in earlier})
        if failed := self._failures.in_words():
            self.note(failed)
        summary = finite(summary)
        self.directory.write_summary(summary)
        self.notify("done", summary)

    @cached_property
    def _file(self) -> tuple[dict[str, str], Inputs]:
        """The names of the model's tensors in its file, and the form of its inputs."""
        return self.federation.setup.model.file_names(), Inputs.of(self.federation.dataset)

    def final_metrics(self, state: ServerState) -> dict[str, Any]:
        """Return the figures of all protocols, the best round by validation, and the figures before a correction."""
        metrics = self._latest or self._noted(self.evaluator.evaluate(state, with_confusion=True))
        if state.before_correction is not None:
            metrics = {**metrics, "global_before_correction": state.before_correction}
        best = {**state.best, "round": state.best["round"] + 1} if state.best else None  # from 1, as people count
        return {**metrics, "best_by_validation": best}

    def _note_once(self, about: object, message: str) -> None:
        """Pass on a message if there is one, and none about the same thing was passed on before."""
        if message and about not in self._noted_about:
            self._noted_about.add(about)
            self.note(message)

    def _note_plugins(self, record: Mapping[str, Any], when: str = "") -> None:
        """Pass on the notes of plugins in a record."""
        for note in record.get("notes", ()):
            self._note_once((note["plugin"], note["message"]), f"{note['plugin']}{when}: {note['message']}")

    def _noted(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return an evaluation's figures. A note tells the first time what could not be evaluated."""
        for problem in (not_evaluated, undefined):
            self._note_once(problem, problem(metrics))
        return metrics

    def reports(self, state: ServerState) -> dict[str, Any]:
        """Return the reports of plugins after the last committed round, as an entry of a record; empty without any."""
        scope = ServerScope(self.federation, state, state.round - 1, "report")
        scope.states = States(state.plugins, read_only="report")
        results = self.federation.setup.plugins.each("report", server=ScopeContext(scope))
        reports = {plugin.name: dict(values) for plugin, values in results if values is not None}
        return {"reports": reports} if reports else {}

    def save(self) -> None:
        """Wait until a checkpoint of the last recorded round is on the disk.

        :raises StorageError: the checkpoint could not be written.
        """
        if self._unsaved is not None:
            self.checkpoint(self._unsaved)
        self.settle()

    def checkpoint(self, state: ServerState) -> None:
        """Wait until the previous checkpoint is on the disk, then begin to save a committed state.

        :raises StorageError: the previous checkpoint could not be written.
        """
        self.settle()
        self._writing = self._writer.submit(self._write, state, self._touched, self._best)
        self._touched, self._unsaved, self._best = set(), None, None
        self._next_checkpoint = time.perf_counter() + CHECKPOINT_SECONDS

    def _write(self, state: ServerState, touched: set[int], best: ServerState | None) -> None:
        """Save a checkpoint, and the model of the best round if it is new, in the writer's thread.

        After a kill at any moment :meth:`RunDirectory.restore` finds the model that fits the checkpoint.
        """
        if best is not None:
            self.directory.write_model(best.model, *self._file, best=best.round)
        self.directory.checkpoint(state, touched)
        if best is not None:
            self.directory.take_best()

    def settle(self) -> None:
        """Wait until the last checkpoint is on the disk.

        :raises StorageError: it could not be written.
        """
        if self._writing is not None:
            try:
                self._writing.result()
            finally:
                if self._writing.done():  # after Ctrl-C the next call waits for it, and raises its error
                    self._writing = None


def out_of_patience(options: TrainingOptions, state: ServerState) -> bool:
    """Whether the best round by the clients' held-out parts lies ``patience`` rounds before the last one."""
    return options.patience is not None and state.round - 1 - state.best.get("round", state.round) >= options.patience
