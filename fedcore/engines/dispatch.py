"""Assignment of tasks to workers: a live session's task to the worker that holds it, any other to an idle worker."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fedcore.client.messages import ClientFailure, ClientTask, FailureKind, Outcome, unpack_error, unpack_outcome

BOUND = ("fit_resume", "end_session")
"""Kinds of tasks that only the worker with the live session can run."""

Pair = tuple[ClientTask, Outcome]


class Worker(Protocol):
    """Runs one task at a time.

    :ivar task: the task that it runs; None while it is idle.
    :ivar ready: whether it has started and takes tasks.
    """

    task: ClientTask | None
    ready: bool

    def start(self, task: ClientTask) -> None:
        """Start a task without raising; a dead worker is detected when the engine waits for its outcome."""


W = TypeVar("W", bound=Worker)

Advance = Callable[[deque[ClientTask], Callable[[ClientTask], bool]], list[Pair]]
"""Removes and starts the tasks of a queue that may start; returns finished tasks, and waits if there are none."""


def in_window(tasks: Iterable[ClientTask], advance: Advance, *, ahead: int | None) -> Iterator[Pair]:
    """Yield each task as it finishes, with bounded look-ahead past the oldest unfinished task.

    :param ahead: how many tasks from the oldest unfinished one on may be started; None for all.
    """
    queue = deque(tasks)
    order = {task.id: index for index, task in enumerate(queue)}
    done: set[int] = set()
    oldest = 0

    def may_start(task: ClientTask) -> bool:
        return ahead is None or order[task.id] < oldest + ahead

    while len(done) < len(order):
        while oldest in done:
            oldest += 1
        for task, outcome in advance(queue, may_start):
            done.add(order[task.id])
            yield task, outcome


_Numbered = tuple[int, ClientTask]


class _Waiting(Generic[W]):
    """The tasks of a run that are not started, by who may run them: any worker, or the one with the live session.

    Each keeps its number in the order of all, so that finding the next one takes no search.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._common: deque[_Numbered] = deque()
        self._bound: dict[W, deque[_Numbered]] = {}
        self._sessions: dict[str, deque[_Numbered]] = {}  # what is bound, once more; without what is lost
        self._lost: list[_Numbered] = []

    def take_from(self, queue: deque[ClientTask], homes: Mapping[str, W]) -> None:
        """Take all tasks of a queue.

        :param homes: session -> the worker that holds it.
        """
        while queue:
            task = queue.popleft()
            numbered, session = (next(self._numbers), task), task.session or ""
            if task.kind not in BOUND:
                self._common.append(numbered)
            elif session in homes:
                self._bound.setdefault(homes[session], deque()).append(numbered)
                self._sessions.setdefault(session, deque()).append(numbered)
            else:
                self._lost.append(numbered)

    def take_next(self, worker: W, may_start: Callable[[ClientTask], bool]) -> ClientTask | None:
        """Return the first task that a worker may run, which then waits no longer; None if there is none."""
        own = self._bound.get(worker, deque())
        while own and own[0][1].session not in self._sessions:
            own.popleft()  # it is among the lost ones
        queues = [queue for queue in (self._common, own) if queue and may_start(queue[0][1])]
        if not queues:
            return None
        _, task = min(queues, key=lambda queue: queue[0][0]).popleft()
        if task.kind in BOUND:
            session = task.session or ""
            self._sessions[session].popleft()
            if not self._sessions[session]:
                del self._sessions[session]
        return task

    def lose(self, session: str) -> None:
        """Note that a session is lost."""
        self._lost.extend(self._sessions.pop(session, ()))

    def take_lost(self) -> list[ClientTask]:
        """Return the tasks whose session is lost, which then wait no longer."""
        lost, self._lost = sorted(self._lost, key=itemgetter(0)), []
        return [task for _, task in lost]


class Dispatcher(Generic[W]):
    """Dispatches tasks to workers in the given order, and delivers outcomes to the caller that waits for them.

    The engine starts the workers, waits for them, and reports to this object with :meth:`take`, :meth:`finish` and
    :meth:`replace`.
    """

    def __init__(self, workers: list[W]) -> None:
        self.workers = workers
        self._homes: dict[str, W] = {}
        self._inboxes: dict[str, list[Pair]] = {}
        self._runs: list[_Waiting[W]] = []

    def run(self, tasks: Iterable[ClientTask], collect: Callable[[], None], *, window: int | None) -> Iterator[Pair]:
        """Run tasks side by side and yield each as it finishes; a live session's task waits for its worker.

        :param collect: waits for a worker's message and reports it to this object.
        :param window: as in :meth:`fedcore.engines.protocol.Engine.run`.
        """
        tasks = list(tasks)
        inbox: list[Pair] = []
        waiting: _Waiting[W] = _Waiting()
        self._inboxes.update((task.id, inbox) for task in tasks)
        self._runs.append(waiting)

        def advance(queue: deque[ClientTask], may_start: Callable[[ClientTask], bool]) -> list[Pair]:
            waiting.take_from(queue, self._homes)
            inbox.extend(self._dispatch(waiting, may_start))
            if not inbox:
                collect()
                # Give the idle worker its next task before the caller processes this outcome.
                inbox.extend(self._dispatch(waiting, may_start))
            finished = inbox.copy()
            inbox.clear()
            return finished

        try:
            yield from in_window(tasks, advance, ahead=None if window is None else window + len(self.workers))
        finally:
            self._runs.remove(waiting)
            for task in tasks:  # outcomes that the caller no longer waits for are dropped on arrival
                self._inboxes.pop(task.id, None)

    def take(self, worker: W, kind: str, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Handle a worker's frame: it is ready, or its task is done.

        :raises FedcoreError: the frame reports an error that would end every other worker, too.
        """
        if kind == "broken":
            worker.task = None
            raise unpack_error(meta)
        if kind == "ready":
            worker.ready = True
        else:
            self.finish(worker, unpack_outcome(kind, tensors, meta))

    def finish(self, worker: W, outcome: Outcome) -> None:
        """Deliver the outcome of a worker's task to the caller that waits for it."""
        task, worker.task = worker.task, None
        if task is None:
            return
        if isinstance(outcome, ClientFailure) or "paused" not in outcome.meta:
            self._lose(task.session or "")
        inbox = self._inboxes.pop(task.id, None)
        if inbox is not None:
            inbox.append((task, outcome))

    def replace(self, gone: W, successor: W, message: str, kind: FailureKind = "worker_lost") -> None:
        """Replace a worker that is gone; its task fails and its sessions are lost."""
        self.workers[self.workers.index(gone)] = successor
        for session in [session for session, home in self._homes.items() if home is gone]:
            self._lose(session)
        if gone.task is not None:
            self.finish(gone, ClientFailure(gone.task.id, kind, message))

    def _lose(self, session: str) -> None:
        self._homes.pop(session, None)
        for waiting in self._runs:
            waiting.lose(session)

    def _dispatch(self, waiting: _Waiting[W], may_start: Callable[[ClientTask], bool]) -> list[Pair]:
        """Give each idle worker the first task that it may run; returns the tasks whose session is lost."""
        for worker in self.workers:
            if worker.task is not None or not worker.ready:
                continue
            task = waiting.take_next(worker, may_start)
            if task is not None:
                worker.start(task)
                if task.session is not None:
                    self._homes[task.session] = worker
        return [
            (task, ClientFailure(task.id, "session_lost", "the worker that held the session is gone"))
            for task in waiting.take_lost()
        ]
