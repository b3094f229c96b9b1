"""The answers of a client's training process to the server's requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcore import FedcoreError, Tensors, __version__
from fedcore.engines import ClientFailure, ClientRuntime, ClientTask, FailureKind, Outcome, SharedPayload
from fedcore.tools import registry
from fedcore_flower import wire
from fedcore_flower.agreement import Setup, own_config, read_setup
from fedcore_flower.conditions import TrainerOptions
from fedcore_flower.history import History
from fedcore_flower.own_data import OwnData
from fedcore_flower.wire import HEAD, SETUP, SHARED, Blobs, WireError
from fedcore_workers import unpack_shared

ASKED = {
    "cells": "counts of categories and of empty cells",
    "bins": "counts of the numbers in intervals, for medians,",
    "squares": "sums of squared distances from the mean",
}
"""The words in which the user reads of a question for statistics; other questions ask for sums."""

KEPT_ANSWERS = 2
"""The number of last answers that are kept for repeated requests. A client's requests come one at a time."""


class _Run:
    """The run that this client takes part in."""

    def __init__(self, setup: Setup, runtime: ClientRuntime) -> None:
        self.setup, self.runtime = setup, runtime
        states = runtime.store.path(setup.client, 0).parent
        self.history = History(states, reach=3 * (runtime.config.checkpoint_every or 1) + 1)
        self.shared_key: str | None = None
        self.shared: SharedPayload | None = None


class RequestHandler:
    """Answers requests: describes the data, joins runs, runs tasks.

    An answer contains only what the run's methods declare: the outcome of a task, as ``ClientRuntime`` returns it.

    :param options: the folder of the client's states, and the conditions under which it takes part.
    :param tell: called with status messages for the user.
    """

    def __init__(
        self, own: OwnData, options: TrainerOptions, tell: Callable[[str], None] = lambda message: None
    ) -> None:
        self._own, self._options, self._tell = own, options, tell
        self._run: _Run | None = None
        self._answers: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def answer(self, blobs: Blobs) -> dict[str, bytes]:
        """Answer one request. A request that is not valid gets a refusal."""
        try:
            op, tensors, header = wire.unpack(blobs)
            if op == "hello":
                return {HEAD: wire.pack("described", {}, fedcore=__version__, **self._own.describe())}
            if op == "statistics":
                return {HEAD: self._answer_statistics(header)}
            if op == "join":
                return {HEAD: self._join(blobs)}
            if op == "probe":
                return {HEAD: wire.pack("here")}
            if op == "task":
                return {HEAD: self._answer_task(tensors, header, blobs)}
            raise WireError(f"an unknown request {op[:40]!r}")
        except WireError as error:
            return {HEAD: wire.pack("refused", {}, message=str(error))}

    def _answer_statistics(self, header: Mapping[str, Any]) -> bytes:
        """Return counts or sums over the training samples, and report the question to the user."""
        question: Any = header.get("question")
        try:
            sums = registry.resolve("feature", "site_answer")(self._own.dataset.train, self._own.train, question)
        except Exception as error:  # the question may have any form
            return wire.pack("refused", {}, message=_describe(error))
        kind = ASKED.get(question["ask"], "sums")
        self._tell(f"the server asked for {kind} over the training samples, by channel or column (--normalize)")
        return wire.pack("statistics", {}, found=sums)

    def _join(self, blobs: Blobs) -> bytes:
        try:
            self._set_up(blobs)
        except Exception as error:  # the configuration may not fit the model, the data or the device in any way
            message = _describe(error)
            self._tell(f"refused to join: {message}")
            return wire.pack("refused", {}, message=message)
        return wire.pack("joined")

    def _set_up(self, blobs: Blobs) -> _Run:
        _, _, header = wire.unpack(blobs, SETUP)
        setup = read_setup(header)
        self._run = None  # free the memory of the run before
        config = own_config(setup, self._options, self._own.dataset.name, self._tell)
        own = getattr(self._own.dataset.train, "columns", ())
        if bool(own) != bool(setup.columns) and setup.kind == self._own.dataset.kind:
            unnamed = "the server's" if own else "the client's"
            self._tell(f"{unnamed} columns have no names, so their order must be: {', '.join(own or setup.columns)}")
        site = self._own.site(config, setup, Path(self._options.state, "runs", setup.run))
        self._run = _Run(setup, ClientRuntime(site))
        for note in site.dataset.notes:
            self._tell(note)
        methods = ", ".join(config.plugins) or "fedavg"
        self._tell(f"joined run {setup.run[:8]} as {setup.name!r}, client {setup.client} of {setup.clients}: {methods}")
        return self._run

    def _answer_task(self, tensors: Tensors, header: dict[str, Any], blobs: Blobs) -> bytes:
        task = wire.unpack_request(tensors, header)
        key = (str(header.get("attempt")), str(task.id))
        if key in self._answers:
            return self._answers[key]
        run, run_id = self._run, header.get("run")
        if run is None or run.setup.run != run_id:
            if SETUP not in blobs:
                return wire.pack("need", {}, names=[SETUP, SHARED] if task.shared is not None else [SETUP])
            try:
                run = self._set_up(blobs)
            except Exception as error:
                return wire.pack_answer(task, ClientFailure("rejected", _describe(error)))
        if SHARED in blobs:
            self._take_shared(run, blobs)
        if task.shared is not None and run.shared_key != task.shared:
            return wire.pack("need", {}, names=[SHARED])
        answer = wire.pack_answer(task, self._run_task(run, task))
        self._answers[key] = answer
        while len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def _take_shared(self, run: _Run, blobs: Blobs) -> None:
        _, tensors, header = wire.unpack(blobs, SHARED)
        key, meta = header.get("key"), header.get("meta")
        if not isinstance(key, str) or not isinstance(meta, dict):
            raise WireError("a shared payload without a key")
        run.shared_key, run.shared = None, None  # free the memory of the payload before
        try:
            run.shared = unpack_shared(tensors, meta).copy_to(run.runtime.placement)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise WireError(f"a shared payload that does not fit the model: {error}") from error
        run.shared_key = key

    def _run_task(self, run: _Run, task: ClientTask) -> Outcome:
        """Run a task. An exception becomes a failure of this client."""
        if task.client != run.setup.client:
            return ClientFailure("rejected", f"a task of client {task.client} came to client {run.setup.client}")
        began = time.perf_counter()
        try:
            run.history.note(task.round, task.version)
            outcome = run.runtime.handle(task, run.shared if task.shared is not None else None)
            if task.kind in ("fit_begin", "fit_resume"):
                run.history.prune(task.round)
        except Exception as error:  # a state is lost, or the fields of the task are wrong in any way
            kind: FailureKind = "raised" if isinstance(error, FedcoreError) else "rejected"
            outcome = ClientFailure(kind, _describe(error))
        result = f": {outcome.kind}, {outcome.message}" if isinstance(outcome, ClientFailure) else ""
        self._tell(f"round {task.round + 1}: {task.kind}, {time.perf_counter() - began:.1f} s{result}")
        return outcome


def _describe(error: Exception) -> str:
    return wire.printable(error if isinstance(error, FedcoreError) else f"{type(error).__name__}: {error}")
