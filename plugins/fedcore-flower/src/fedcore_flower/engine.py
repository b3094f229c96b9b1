"""The engine of a federation. It sends tasks to the clients' training processes."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from fedcore.engines import ClientFailure, ClientTask, Outcome, Pair, SharedPayload
from fedcore_flower import wire
from fedcore_flower.courier import Answer, Courier, Request
from fedcore_workers import Window, pack_shared

MESSAGE_KINDS = {"evaluate": "evaluate", "ask": "query"}
"""The kind of Flower's message for a kind of task. Other tasks are ``train`` messages."""


class FederationEngine:
    """Runs each client's tasks at its organisation: one at a time at each, at all organisations at the same time.

    :param names: the clients' names, in the order of their numbers.
    :param setups: the description of the run for each client (:func:`fedcore_flower.agreement.describe_run`).
    :param run: the run's id.
    """

    def __init__(self, courier: Courier, names: Sequence[str], setups: Mapping[int, bytes], *, run: str) -> None:
        self.workers = len(names)
        self._courier, self._names, self._setups, self._run = courier, names, setups, run
        self._attempt = uuid.uuid4().hex
        self._shared: dict[str, bytes] = {}
        self._sent: dict[int, str] = {}  # the key of the payload that a client was last sent

    def share(self, key: str, payload: SharedPayload) -> None:
        """Keep a payload. Each client gets it with its first task that names it."""
        tensors, meta = pack_shared(payload)
        self._shared[key] = wire.pack("shared", tensors, key=key, meta=meta)

    def unshare(self, key: str) -> None:
        """Delete a payload; idempotent."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks. Yield each with its outcome as it arrives. The task of a client that is away fails at once."""
        tasks = list(tasks)
        known, queue = {task.id for task in tasks}, deque(tasks)
        pending = Window(tasks, None if window is None else window + self.workers)
        while pending.unfinished:
            for task, outcome in self._dispatch(queue, pending) or self._collect(known):
                pending.finish(task)
                yield task, outcome

    def close(self) -> None:
        """Delete all payloads; idempotent."""
        self._shared.clear()

    def _dispatch(self, queue: deque[ClientTask], pending: Window) -> list[Pair]:
        """Send the tasks that may start. Return those that cannot be sent, with their failures."""
        failed: list[Pair] = []
        waiting: list[ClientTask] = []
        held: set[int] = set()  # the clients with waiting tasks: a client's tasks keep their order
        while queue and pending.may_start(queue[0]):
            task = queue.popleft()
            if task.client in held or task.client in self._courier.busy:
                held.add(task.client)
                waiting.append(task)
                continue
            failure = self._courier.send(self._request(task))
            if failure is not None:
                failed.append((task, self._outcome(task, failure)))
        queue.extendleft(reversed(waiting))
        return failed

    def _request(self, task: ClientTask) -> Request:
        parts = {wire.SETUP: self._setups[task.client]}
        attach = []
        if task.shared is not None and task.shared in self._shared:
            parts[wire.SHARED] = self._shared[task.shared]
            if self._sent.get(task.client) != task.shared:
                attach.append(wire.SHARED)
                self._sent[task.client] = task.shared
        head = wire.pack_request(task, attempt=self._attempt, run=self._run)
        return Request(task.client, MESSAGE_KINDS.get(task.kind, "train"), head, parts, attach, task)

    def _collect(self, known: Container[str]) -> list[Pair]:
        """Return the tasks that ended, with their outcomes."""
        finished: list[Pair] = []
        for request, answer in self._courier.collect():
            task = request.task
            assert task is not None
            outcome = self._outcome(task, answer)
            if task.id in known:  # otherwise its caller has given its round up
                finished.append((task, outcome))
        return finished

    def _outcome(self, task: ClientTask, answer: Answer | ClientFailure) -> Outcome:
        if isinstance(answer, ClientFailure):
            self._sent.pop(task.client, None)  # the client may not have the payload
            outcome: Outcome = answer
        else:
            try:
                outcome = wire.unpack_answer(task, *answer)
            except wire.WireError as error:
                outcome = ClientFailure("rejected", f"sent {error}")
        if isinstance(outcome, ClientFailure):
            return ClientFailure(outcome.kind, f"{self._names[task.client]}: {wire.printable(outcome.message)}")
        return outcome
