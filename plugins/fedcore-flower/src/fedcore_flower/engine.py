"""The engine of a federation of organisations: tasks go to the clients' resident processes over a link."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from fedcore.engines import ClientFailure, ClientTask, Outcome, Pair, SharedPayload, Window, pack_shared
from fedcore_flower import wire
from fedcore_flower.courier import Answer, Courier, Errand, Trouble

KINDS = {"evaluate": "evaluate", "ask": "query"}
"""What a kind of task is to Flower; the others are training."""


class FederationEngine:
    """Runs each client's tasks at its organisation, one at a time, those of different clients side by side.

    :param names: the clients' names, in their order.
    :param setups: what each client needs to know of the run, by client (``fedcore_flower.setup``).
    :param attempt: see :func:`fedcore_flower.wire.pack_request`.
    :param run: the run's id.
    """

    def __init__(
        self, courier: Courier, names: Sequence[str], setups: Mapping[int, bytes], *, attempt: str, run: str
    ) -> None:
        self.workers = len(names)
        self._courier, self._names, self._setups = courier, names, setups
        self._attempt, self._run = attempt, run
        self._shared: dict[str, bytes] = {}
        self._has: dict[int, str] = {}  # the payload that a client was last sent

    def share(self, key: str, payload: SharedPayload) -> None:
        """Keep a payload, to be sent to each client with the first task that names it."""
        tensors, meta = pack_shared(payload)
        self._shared[key] = wire.pack("shared", tensors, key=key, meta=meta)

    def unshare(self, key: str) -> None:
        """Forget a payload; idempotent."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks and yield each with its outcome as it arrives; a client that is away fails at once."""
        tasks = list(tasks)
        known, queue = {task.id for task in tasks}, deque(tasks)
        pending = Window(tasks, None if window is None else window + self.workers)
        while pending.unfinished:
            for task, outcome in self._dispatch(queue, pending) or self._collect(known):
                pending.finish(task)
                yield task, outcome

    def close(self) -> None:
        """Forget everything that was shared; idempotent."""
        self._shared.clear()

    def _dispatch(self, queue: deque[ClientTask], pending: Window) -> list[Pair]:
        """Send what can be sent; returns the tasks that cannot."""
        failed: list[Pair] = []
        waiting: list[ClientTask] = []
        held: set[int] = set()  # a client's tasks keep their order
        while queue and pending.may_start(queue[0]):
            task = queue.popleft()
            if task.client in held or task.client in self._courier.busy:
                held.add(task.client)
                waiting.append(task)
                continue
            trouble = self._courier.send(self._errand(task))
            if trouble is not None:
                self._has.pop(task.client, None)
                failed.append((task, self._failure(task, trouble)))
        queue.extendleft(reversed(waiting))
        return failed

    def _errand(self, task: ClientTask) -> Errand:
        parts = {wire.SETUP: self._setups[task.client]}
        attach = []
        if task.shared is not None and task.shared in self._shared:
            parts[wire.SHARED] = self._shared[task.shared]
            if self._has.get(task.client) != task.shared:
                attach.append(wire.SHARED)
                self._has[task.client] = task.shared
        head = wire.pack_request(task, attempt=self._attempt, run=self._run)
        return Errand(task.client, KINDS.get(task.kind, "train"), head, parts, attach, task)

    def _collect(self, known: Container[str]) -> list[Pair]:
        finished: list[Pair] = []
        for errand, answer in self._courier.collect():
            task: ClientTask = errand.note
            if isinstance(answer, Trouble):
                self._has.pop(task.client, None)
            if task.id in known:  # else: of a round that its caller gave up
                finished.append((task, self._outcome(task, answer)))
        return finished

    def _outcome(self, task: ClientTask, answer: Answer | Trouble) -> Outcome:
        if isinstance(answer, Trouble):
            return self._failure(task, answer)
        try:
            outcome = wire.unpack_answer(task, *answer)
        except wire.WireError as error:
            return self._failure(task, Trouble("rejected", f"sent {error}"))
        if isinstance(outcome, ClientFailure):
            return self._failure(task, Trouble(outcome.kind, outcome.message))
        return outcome

    def _failure(self, task: ClientTask, trouble: Trouble) -> ClientFailure:
        return ClientFailure(trouble.kind, f"{self._names[task.client]}: {wire.shown(trouble.message)}")
