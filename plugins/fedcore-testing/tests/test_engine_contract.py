"""The check of engines passes on those that keep the contract, and names what each planted defect breaks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import pytest
import torch

from fedcore import ClientUpdate, FedcoreError
from fedcore.engines import ClientFailure, ClientRuntime, InProcessEngine, Reply
from fedcore_testing import check_engine, federate, model_bytes
from tests.sentences import raises


class LastFirst(InProcessEngine):
    """Keeps the contract: the order of outcomes is free."""

    def run(self, tasks, *, window=None):
        yield from reversed(list(super().run(tasks, window=window)))


class Drops(InProcessEngine):
    def run(self, tasks, *, window=None):
        yield from list(super().run(tasks, window=window))[:-1]


class Repeats(InProcessEngine):
    def run(self, tasks, *, window=None):
        for pair in super().run(tasks, window=window):
            yield from (pair, pair)


class AnswersUnasked(InProcessEngine):
    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            yield replace(task, id="other"), outcome


class MixesUp(InProcessEngine):
    def run(self, tasks, *, window=None):
        pairs = list(super().run(tasks, window=window))
        outcomes = deque(outcome for _, outcome in pairs)
        outcomes.rotate(1)
        yield from zip((task for task, _ in pairs), outcomes, strict=True)


class Raises(InProcessEngine):
    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            if isinstance(outcome, ClientFailure):
                raise RuntimeError(outcome.message)
            yield task, outcome


class SaysNotWhy(InProcessEngine):
    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            yield task, replace(outcome, message="failed") if isinstance(outcome, ClientFailure) else outcome


class CallsItLost(InProcessEngine):
    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            yield task, replace(outcome, kind="worker_lost") if isinstance(outcome, ClientFailure) else outcome


class Pretends(InProcessEngine):
    """Gives an empty result for what failed."""

    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            yield task, Reply({}) if isinstance(outcome, ClientFailure) else outcome


class OnePayload(InProcessEngine):
    """Takes what was shared last for what a task names."""

    def share(self, key, payload):
        super().share(key, payload)
        self.last = key

    def run(self, tasks, *, window=None):
        tasks = list(tasks)
        named = {task.id: task for task in tasks}
        for task, outcome in super().run([replace(task, shared=self.last) for task in tasks], window=window):
            yield named[task.id], outcome


class ReadsTwice(InProcessEngine):
    def run(self, tasks, *, window=None):
        assert len(list(tasks)) >= 0
        yield from super().run(tasks, window=window)


class StopsAtTheWindow(InProcessEngine):
    def run(self, tasks, *, window=None):
        yield from super().run(list(tasks)[:window], window=window)


class KeepsTheRest(InProcessEngine):
    """Goes on with what the caller left behind."""

    def __init__(self, spec):
        super().__init__(spec)
        self.queue = deque()

    def run(self, tasks, *, window=None):
        self.queue.extend(tasks)
        while self.queue:
            yield from super().run([self.queue.popleft()])


class Rounds(InProcessEngine):
    """Sends tensors in half the precision."""

    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            if isinstance(outcome, Reply):
                half = {name: tensor.to(torch.float16).float() if tensor.is_floating_point() else tensor
                        for name, tensor in outcome.tensors.items()}  # fmt: skip
                outcome = replace(outcome, tensors=half)
            yield task, outcome


class Flattens(InProcessEngine):
    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            if isinstance(outcome, Reply):
                outcome = replace(outcome, tensors={k: t.reshape(-1) for k, t in outcome.tensors.items()})
            yield task, outcome


class Forgets(InProcessEngine):
    """Starts every client from an empty state."""

    def run(self, tasks, *, window=None):
        tasks = list(tasks)
        named = {task.id: task for task in tasks}
        for task, outcome in super().run([replace(task, version=None) for task in tasks], window=window):
            yield named[task.id], outcome


class LosesSessions(InProcessEngine):
    """Has a fresh client side for every task."""

    def __init__(self, spec):
        super().__init__(spec)
        self.spec = spec

    def run(self, tasks, *, window=None):
        for task in tasks:
            yield task, ClientRuntime(self.spec).handle(task.complete(), self._shared.get(task.shared or ""))


class DrawsItsOwn(InProcessEngine):
    """Lets clients train on the random numbers of another seed."""

    def __init__(self, spec):
        super().__init__(replace(spec, config=spec.config.model_copy(update={"seed": 1})))


class SharesOnce(InProcessEngine):
    def unshare(self, key):
        del self._shared[key]


class ForgetsAll(InProcessEngine):
    def unshare(self, key):
        self._shared.clear()


class ClosesOnce(InProcessEngine):
    closed = False

    def close(self):
        if self.closed:
            raise FedcoreError("closed already")
        self.closed = True


class Idle(InProcessEngine):
    workers = 0


class Nameless(InProcessEngine):
    workers = None


class OnlyOne(InProcessEngine):
    """Breaks with two workers."""

    def __init__(self, spec):
        super().__init__(spec)
        self.many = spec.config.workers > 1

    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            if self.many and isinstance(outcome, ClientUpdate):
                for tensor in filter(torch.is_floating_point, outcome.model.values()):  # by name, or all as one
                    tensor += 1e-6
            yield task, outcome


@pytest.mark.parametrize("engine", [InProcessEngine, LastFirst])
def test_engines_that_keep_the_contract_pass(engine, tmp_path):
    check_engine(engine, tmp_path)


@pytest.mark.slow
def test_worker_processes_keep_it(tmp_path):
    check_engine("local", tmp_path, workers=(0, 1, 2, 3))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (Drops, ("run(window=None)", "'check-window-None-4'")),
        (Repeats, ("'check-window-None-0'", "twice")),
        (AnswersUnasked, ("'other'",)),
        (MixesUp, ("'answer'", "other values")),
        (Raises, ("RuntimeError", "as it should (probe.py:", "ClientFailure")),
        (SaysNotWhy, ("message",)),
        (CallsItLost, ("'worker_lost'", "'raised'")),
        (Pretends, ("a result", "'raised'")),
        (OnePayload, ("shared 'first'", "'answer'", "other values")),
        (ReadsTwice, ("'check-plain-0'",)),
        (StopsAtTheWindow, ("run(window=1)",)),
        (KeepsTheRest, ("'check-abandoned-1'",)),
        (Flattens, ("'large'", "(40000,)")),
        (SharesOnce, ("unshare(key)", "KeyError: 'first'")),
        (ForgetsAll, ("'check-kept-0'",)),
        (ClosesOnce, ("close()", "FedcoreError: closed already")),
        (Idle, ("engine.workers", 0)),
        (Nameless, ("engine.workers", None)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_breaks_it_is_named(engine, named, tmp_path):
    with raises(AssertionError, *named):
        check_engine(engine, tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Rounds, "'scalar' comes back as|'large' comes back with other values"),
        (Forgets, "round 1: 'losses' differs|the state of client . differs"),
        (LosesSessions, "a federation ends with RoundFailedError: .* session_lost"),
        (DrawsItsOwn, "differs from the local engine's"),
        (OnlyOne, "with workers=2.* differ"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_breaks_it_is_named_by_what_is_seen_first(engine, words, tmp_path):
    with pytest.raises(AssertionError, match=words):
        check_engine(engine, tmp_path)


def test_an_engine_that_is_not_installed_is_said(tmp_path):
    with raises(AssertionError, "'local'"):
        check_engine("loca", tmp_path)


def test_it_stops_what_it_started_when_it_fails(tmp_path):
    closed = []

    class Watched(Drops):
        def close(self):
            closed.append(time.monotonic())

    with raises(AssertionError):
        check_engine(Watched, tmp_path)
    assert len(closed) == 1


def test_a_federation_names_its_engine(tmp_path):
    named = federate(tmp_path, engine="local", rounds=1)
    assert model_bytes(named) == model_bytes(federate(tmp_path, engine=InProcessEngine, rounds=1))
    with raises(FedcoreError, "'local'"):
        federate(tmp_path, engine="loca")
