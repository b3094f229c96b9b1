"""The process that trains at a client, as it answers the server's requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fedcore import FedcoreError, Tensors, __version__
from fedcore.engines import (
    ClientFailure,
    ClientRuntime,
    ClientTask,
    FailureKind,
    Outcome,
    SharedPayload,
    unpack_shared,
)
from fedcore_flower import wire
from fedcore_flower.agreement import RUN_ID, Setup, own_config, read_setup, run_folder
from fedcore_flower.history import History
from fedcore_flower.own_data import OwnData
from fedcore_flower.wire import HEAD, SETUP, SHARED, Blobs, WireError

KEPT_ANSWERS = 2
"""Answers that are kept for a request that is repeated; a node's requests come one at a time."""

Tell = Callable[[str], None]


class _Run:
    """What is live of one run."""

    def __init__(self, setup: Setup, runtime: ClientRuntime) -> None:
        self.setup, self.runtime = setup, runtime
        reach = 3 * runtime.config.checkpoint_every + 1
        self.history = History(runtime.store, setup.client, reach)
        self.key: str | None = None
        self.shared: SharedPayload | None = None


class Resident:
    """Answers requests: describes the data, joins runs, works on tasks.

    Only what the run's methods declare goes up: a task's outcome, as ``ClientRuntime`` gives it.

    :param allowed: methods that this client takes part in; None: all that are installed.
    :param models: names of models that may read this machine's files.
    :param tell: called with status messages for the user.
    """

    def __init__(
        self,
        own: OwnData,
        state: Path,
        *,
        allowed: Collection[str] | None = None,
        models: Collection[str] = (),
        device: str = "auto",
        tell: Tell = lambda message: None,
    ) -> None:
        self._own, self._state, self._tell = own, state, tell
        self._conditions: dict[str, Any] = {"allowed": allowed, "models": models, "device": device, "tell": tell}
        self._run: _Run | None = None
        self._answers: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def answer(self, blobs: Blobs) -> dict[str, bytes]:
        """Answer one request; never raises for what it says."""
        try:
            op, tensors, header = wire.unpack(blobs)
            if op == "hello":
                return {HEAD: wire.pack("described", {}, fedcore=__version__, **self._own.describe())}
            if op == "join":
                return {HEAD: self._joined(blobs)}
            if op == "probe":
                return {HEAD: wire.pack("here")}
            if op == "task":
                return {HEAD: self._worked(tensors, header, blobs)}
            raise WireError(f"a request {op[:40]!r} that is unknown")
        except WireError as error:
            return {HEAD: wire.pack("refused", {}, message=str(error))}

    def _joined(self, blobs: Blobs) -> bytes:
        try:
            self._set_up(blobs)
        except Exception as error:  # whatever a configuration makes of the model and the data here
            message = _said(error)
            self._tell(f"refused to join: {message}")
            return wire.pack("refused", {}, message=message)
        return wire.pack("joined")

    def _set_up(self, blobs: Blobs) -> _Run:
        _, _, header = wire.unpack(blobs, SETUP)
        setup = read_setup(header)
        self._run = None  # its memory is free for the next one's
        config = own_config(setup, dataset=self._own.dataset.name, **self._conditions)
        spec = self._own.spec(config, setup, run_folder(self._state, setup.run))
        self._run = _Run(setup, ClientRuntime(spec))
        methods = ", ".join(config.plugins) or "fedavg"
        self._tell(f"joined run {setup.run[:8]} as {setup.name!r}, client {setup.client} of {setup.clients}: {methods}")
        return self._run

    def _worked(self, tensors: Tensors, header: dict[str, Any], blobs: Blobs) -> bytes:
        task = wire.unpack_request(tensors, header)
        run_id, attempt = header.get("run"), header.get("attempt")
        if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id) or not isinstance(attempt, str):
            raise WireError("a task of no run")
        key = (attempt, str(task.id))
        if key in self._answers:
            return self._answers[key]
        run = self._run
        try:
            if SETUP in blobs and (run is None or run.setup.run != run_id):
                run = self._set_up(blobs)
        except Exception as error:
            return wire.failure(task, "rejected", _said(error))
        if run is None or run.setup.run != run_id:
            return wire.pack("need", {}, names=[SETUP, SHARED] if task.shared is not None else [SETUP])
        if SHARED in blobs:
            self._take_shared(run, blobs)
        if task.shared is not None and run.key != task.shared:
            return wire.pack("need", {}, names=[SHARED])
        answer = wire.pack_answer(task, self._handled(run, task))
        self._answers[key] = answer
        while len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def _take_shared(self, run: _Run, blobs: Blobs) -> None:
        _, tensors, header = wire.unpack(blobs, SHARED)
        key, meta = header.get("key"), header.get("meta")
        if not isinstance(key, str) or not isinstance(meta, dict):
            raise WireError("a payload without a name")
        run.key, run.shared = None, None  # one at a time in memory
        try:
            run.shared = unpack_shared(tensors, meta).copy_to(run.runtime.placement)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise WireError(f"a payload that is no model: {error}") from error
        run.key = key

    def _handled(self, run: _Run, task: ClientTask) -> Outcome:
        """Work on a task; whatever happens is this client's failure alone."""
        if task.client != run.setup.client:
            return ClientFailure("rejected", f"a task of client {task.client}, this is {run.setup.client}")
        began = time.perf_counter()
        try:
            run.history.note(task.round, task.version)
            outcome = run.runtime.handle(task, run.shared if task.shared is not None else None)
            if task.kind in ("fit_begin", "fit_resume"):
                run.history.prune(task.round)
        except Exception as error:  # a lost state, or what a server may make of a task's fields
            kind: FailureKind = "raised" if isinstance(error, FedcoreError) else "rejected"
            outcome = ClientFailure(kind, _said(error))
        words = f": {outcome.kind}, {outcome.message}" if isinstance(outcome, ClientFailure) else ""
        self._tell(f"round {task.round + 1}: {task.kind}, {time.perf_counter() - began:.1f} s{words}")
        return outcome


def _said(error: Exception) -> str:
    return wire.shown(error if isinstance(error, FedcoreError) else f"{type(error).__name__}: {error}")
