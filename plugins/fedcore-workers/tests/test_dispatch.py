"""Who gets which task: sessions stay where they began, order of dispatch and window hold, lost ones are said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedcore.engines import ClientFailure, ClientTask, Pause, Reply
from fedcore_workers import Dispatcher


class Fake:
    """A worker that only notes what it was given."""

    def __init__(self, name, ready=True):
        self.name, self.ready, self.task, self.had = name, ready, None, []

    def start(self, task):
        self.task = task
        self.had.append(task.id)


def fits(count, kind="fit_begin", round=0):
    return [
        ClientTask(f"{kind}-{round}-{client}", kind, client, round, session=f"{round}-{client}")
        for client in range(count)
    ]


def finished(task, paused=False):
    return Pause(1, {}) if paused else Reply({})


def ends(dispatcher, worker, paused=False):
    """Return a collect that lets one worker finish."""
    return lambda: dispatcher.finish(worker, finished(worker.task, paused))


def drive(dispatcher, tasks, choose, window=None, paused=False):
    """Run tasks, whichever busy worker ``choose`` picks finishing next; returns the ids in order of their end."""

    def collect():
        busy = [worker for worker in dispatcher.workers if worker.task is not None]
        assert busy, "waits for nobody"
        worker = choose(busy)
        dispatcher.finish(worker, finished(worker.task, paused))

    return [task.id for task, _ in dispatcher.run(tasks, collect, window=window)]


def test_tasks_are_handed_out_in_order():
    workers = [Fake("a"), Fake("b")]
    tasks = fits(5)
    drive(Dispatcher(workers), tasks, lambda busy: busy[-1])
    assert workers[0].had == ["fit_begin-0-0"], "a was never the last to be picked"
    assert workers[1].had == [f"fit_begin-0-{client}" for client in range(1, 5)]


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_task_starts_further_ahead_than_the_window(window, seed):
    workers = [Fake("a"), Fake("b"), Fake("c")]
    dispatcher = Dispatcher(workers)
    tasks, chance, done = fits(20), np.random.default_rng(seed), set()

    def choose(busy):
        oldest = next(index for index in range(20) if index not in done)
        started = [tasks.index(worker.task) for worker in busy]
        assert max(started) < oldest + window + len(workers)
        chosen = busy[chance.integers(len(busy))]
        done.add(tasks.index(chosen.task))
        return chosen

    assert sorted(drive(dispatcher, tasks, choose, window)) == sorted(task.id for task in tasks)


def test_a_worker_has_its_next_task_before_the_caller_sees_the_last():
    worker = Fake("a")
    dispatcher = Dispatcher([worker])
    tasks = fits(3)
    for index, (task, _) in enumerate(dispatcher.run(tasks, ends(dispatcher, worker), window=None)):
        assert task is tasks[index]
        assert worker.task is (tasks[index + 1] if index < 2 else None)


def test_without_a_window_the_first_may_be_the_last():
    tasks = fits(6)
    ended = drive(Dispatcher([Fake("a"), Fake("b")]), tasks, lambda busy: busy[-1])
    assert ended[-1] == tasks[0].id


def test_a_paused_session_goes_on_where_it_began():
    workers = [Fake("a"), Fake("b")]
    dispatcher = Dispatcher(workers)
    drive(dispatcher, fits(6), lambda busy: busy[0] if len(workers[0].had) < 3 else busy[-1], paused=True)
    homes = {task.rpartition("-")[2]: worker for worker in workers for task in worker.had}
    drive(dispatcher, fits(6, "fit_resume"), lambda busy: busy[-1])
    for worker in workers:
        assert {homes[task.rpartition("-")[2]] for task in worker.had} == {worker}


def test_a_worker_that_is_not_ready_gets_nothing():
    workers = [Fake("a", ready=False), Fake("b")]
    drive(Dispatcher(workers), fits(4), lambda busy: busy[0])
    assert workers[0].had == []


def test_a_lost_worker_fails_its_task_and_its_sessions_and_nobody_elses():
    a, b, successor = Fake("a"), Fake("b"), Fake("c", ready=False)
    dispatcher = Dispatcher([a, b])
    drive(dispatcher, fits(4), lambda busy: busy[0] if len(a.had) < 3 else busy[-1], paused=True)
    held = {worker.name: [int(task.rpartition("-")[2]) for task in worker.had] for worker in (a, b)}
    assert held["a"]
    assert held["b"]

    def collect():
        if a in dispatcher.workers:
            dispatcher.replace(a, successor, "it is gone")
        else:
            dispatcher.finish(b, finished(b.task))

    outcomes = {task.client: outcome for task, outcome in dispatcher.run(fits(4, "fit_resume"), collect, window=None)}
    kinds = {client: outcome.kind for client, outcome in outcomes.items() if isinstance(outcome, ClientFailure)}
    assert sorted(kinds) == sorted(held["a"])
    assert sorted(kinds.values()) == ["session_lost"] * (len(held["a"]) - 1) + ["worker_lost"]
    assert successor.had == []


def test_a_session_that_nobody_holds_is_lost_at_once():
    ((task, outcome),) = Dispatcher([Fake("a")]).run(fits(1, "fit_resume"), lambda: None, window=None)
    assert (task.client, outcome.kind) == (0, "session_lost")


@pytest.mark.parametrize("kind", ["fit_begin", "fit_resume", "ask"])
def test_the_work_for_a_task_does_not_grow_with_their_number(kind):
    """Measured by how often tasks are looked at; with a search in each dispatch, 8,000 took 4 s."""
    looked = 0

    class Seen(ClientTask):
        def __getattribute__(self, name):
            nonlocal looked
            looked += 1
            return super().__getattribute__(name)

    dispatcher = Dispatcher([Fake(str(number)) for number in range(4)])
    turns = itertools.count()
    choose = lambda busy: busy[next(turns) % len(busy)]  # noqa: E731
    drive(dispatcher, fits(1000), choose, paused=True)
    tasks = [Seen(f"{kind}-{client}", kind, client, 0, session=f"0-{client}") for client in range(1000)]
    drive(dispatcher, tasks, choose, paused=True)
    assert looked < 30 * len(tasks)


def test_what_the_caller_left_behind_is_dropped():
    a, b = Fake("a"), Fake("b")
    dispatcher = Dispatcher([a, b])
    abandoned = dispatcher.run(fits(3), ends(dispatcher, a), window=None)
    next(abandoned)
    abandoned.close()
    assert b.task is not None, "it is at a task of the abandoned run"
    later = fits(2, round=1)
    assert sorted(drive(dispatcher, later, lambda busy: busy[-1])) == [task.id for task in later]


def test_an_outcome_that_comes_twice_counts_once():
    worker = Fake("a")
    dispatcher = Dispatcher([worker])

    def collect():
        outcome = finished(worker.task)
        dispatcher.finish(worker, outcome)
        dispatcher.finish(worker, outcome)

    assert len(list(dispatcher.run(fits(2), collect, window=None))) == 2
