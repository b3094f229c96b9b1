"""Assignment of tasks to workers. A paused client's task goes to the worker that holds it, others to idle workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fedcore import Tensors
from fedcore.engines import ClientFailure, ClientTask, FailureKind, Pause
from fedcore_workers.messages import unpack_error, unpack_outcome


@dataclass(frozen=True)
class Bundle(ClientTask):
    """Tasks that go to a worker in one message. Its outcome is a function that returns their outcomes.

    They belong to no session and carry no tensors. A switch between processes costs as much as a client of one step.
    How many short tasks are bundled is a question of time. If the runner takes trainings together, results depend on
    who is in a bundle.
    """

    tasks: tuple[ClientTask, ...] = ()

    @classmethod
    def of(cls, tasks: Sequence[ClientTask]) -> ClientTask:
        """Join tasks; a single one is returned as it is."""
        first = tasks[0]
        if len(tasks) == 1:
            return first
        return cls(f"bundle-{first.id}", first.kind, first.client, first.round, shared=first.shared, tasks=tuple(tasks))


class Worker(Protocol):
    """Runs one task at a time."""

    task: ClientTask | None
    """The task that the worker runs; None while it is idle."""
    ready: bool
    """Whether the worker has started and takes tasks."""

    def start(self, task: ClientTask) -> None:
        """Start a task without raising. The engine finds a dead worker when it waits for the outcome."""


W = TypeVar("W", bound=Worker)

Done = tuple[ClientTask, Any]
"""A task and its outcome. An engine may define outcomes for its own kinds of tasks."""


class Window:
    """The tasks of one call that may start: a bounded number, from the oldest unfinished one on.

    :param tasks: all tasks, in their order.
    :param ahead: the number of tasks, from the oldest unfinished one on, that may be started; None for all.
    """

    def __init__(self, tasks: Iterable[ClientTask], ahead: int | None) -> None:
        self._ahead = ahead
        self._order = {task.id: index for index, task in enumerate(tasks)}
        self._done: set[int] = set()
        self._oldest = 0

    @property
    def unfinished(self) -> bool:
        """Whether there are unfinished tasks."""
        return len(self._done) < len(self._order)

    def may_start(self, task: ClientTask) -> bool:
        """Return whether a task may start now."""
        return self._ahead is None or self._order[task.id] < self._oldest + self._ahead

    def finish(self, task: ClientTask) -> None:
        """Note that a task is finished."""
        self._done.add(self._order[task.id])
        while self._oldest in self._done:
            self._oldest += 1


_Waiting = dict[object, deque[ClientTask]]
"""The tasks that are not started: under None the tasks for any worker, under a worker the tasks for it alone."""
_NOBODY = object()
"""The key of tasks whose session no worker holds."""


class Dispatcher(Generic[W]):
    """Dispatches tasks to workers in the given order. Delivers outcomes to the caller that waits for them.

    The engine starts the workers and waits for their messages. It reports to this object with :meth:`take`,
    :meth:`finish` and :meth:`replace`.
    """

    def __init__(self, workers: list[W]) -> None:
        self.workers = workers
        self._homes: dict[str, W] = {}  # session -> the worker that holds it
        self._inboxes: dict[str, list[Done]] = {}  # task -> where its caller waits for the outcome

    def run(self, tasks: Iterable[ClientTask], collect: Callable[[], None], *, window: int | None) -> Iterator[Done]:
        """Run tasks side by side and yield each as it finishes. A paused client's task waits for its worker.

        :param collect: waits for a worker's message and reports it to this object.
        :param window: as in :meth:`fedcore.engines.Engine.run`.
        """
        tasks = list(tasks)
        inbox: list[Done] = []
        pending = Window(tasks, None if window is None else window + len(self.workers))
        waiting: _Waiting = {}
        self._inboxes.update((task.id, inbox) for task in tasks)
        for task in tasks:
            home = self._homes.get(task.session or "", _NOBODY) if task.kind == "fit_resume" else None
            waiting.setdefault(home, deque()).append(task)
        try:
            while pending.unfinished:
                inbox.extend(self._dispatch(waiting, pending))
                if not inbox:
                    collect()
                    # Give the idle worker its next task before the caller processes this outcome.
                    inbox.extend(self._dispatch(waiting, pending))
                finished = inbox.copy()
                inbox.clear()
                for task, outcome in finished:
                    pending.finish(task)
                    yield task, outcome
        finally:
            for task in tasks:  # outcomes that the caller no longer waits for are dropped on arrival
                self._inboxes.pop(task.id, None)

    def take(self, worker: W, kind: str, tensors: Tensors, meta: dict[str, Any]) -> None:
        """Handle a worker's message that it is ready, or that its task is done.

        :raises FedcoreError: the message reports an error that every other worker would also meet.
        """
        if kind == "broken":
            worker.task = None
            raise unpack_error(meta)
        if kind == "ready":
            worker.ready = True
        else:
            self.finish(worker, unpack_outcome(tensors, meta))

    def finish(self, worker: W, outcome: Any) -> None:
        """Deliver the outcome of a worker's task to the caller that waits for it."""
        task, worker.task = worker.task, None
        if task is None:
            return
        if not isinstance(outcome, Pause):
            self._homes.pop(task.session or "", None)
        inbox = self._inboxes.pop(task.id, None)
        if inbox is not None:
            inbox.append((task, outcome))

    def replace(self, gone: W, successor: W, message: str, kind: FailureKind = "worker_lost") -> None:
        """Replace a worker that is gone. Its task fails, and its sessions are lost."""
        self.workers[self.workers.index(gone)] = successor
        self._homes = {session: home for session, home in self._homes.items() if home is not gone}
        self.finish(gone, ClientFailure(kind, message))

    def _dispatch(self, waiting: _Waiting, pending: Window) -> list[Done]:
        """Give each idle worker the first task that it may run. Return the tasks whose session is lost."""
        for worker in self.workers:
            if worker.task is not None or not worker.ready:
                continue
            for queue in (waiting.get(worker), waiting.get(None)):
                if queue and pending.may_start(queue[0]):
                    task = queue.popleft()
                    worker.start(task)
                    if task.session is not None:
                        self._homes[task.session] = worker
                    break
        lost = [home for home in waiting if home is not None and home not in self.workers]
        failure = ClientFailure("session_lost", "the worker that held the session is gone")
        return [(task, failure) for home in lost for task in waiting.pop(home)]
