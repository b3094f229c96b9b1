"""In-process engines that record or replace clients' messages, and another order of these, for tests of aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from fedcore.base.tensors import unflatten
from fedcore.client.messages import ClientResult, ClientTask, Outcome
from fedcore.client.worker_spec import WorkerSpec
from fedcore.engines.in_process import InProcessEngine
from fedcore.server import cohort

Run = Iterator[tuple[ClientTask, Outcome]]


class Listening(InProcessEngine):
    """Keeps every broadcast and every finished update.

    :ivar broadcasts: the shared payloads in order, by tensor name.
    :ivar messages: what single clients got beside them to train with, by round and client.
    :ivar updates: the uploads by round and client.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.broadcasts: list[dict[str, Tensor]] = []
        self.messages: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.updates: dict[tuple[int, int], dict[str, Tensor]] = {}

    def share(self, key: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Share a payload and keep the plugins' tensors."""
        sent = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("broadcast/")}
        self.broadcasts.append(sent)
        super().share(key, tensors, meta)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Run:
        """Run tasks and keep the messages and the updates."""
        for task, outcome in super().run(tasks, window=window):
            if task.kind == "fit_begin":
                own = {f"broadcast/{name}": tensor.clone() for name, tensor in task.tensors.items()}
                self.messages[task.round, task.client] = own
            if is_update(task, outcome):
                assert isinstance(outcome, ClientResult)
                tensors = {name: tensor.clone() for name, tensor in outcome.tensors.items()}
                self.updates[task.round, task.client] = tensors
            yield task, outcome


class Echoing(InProcessEngine):
    """Replaces every update of a round with the first one's.

    :ivar sent: the model in the first update of the last round, by name.
    """

    sent: dict[str, Tensor]

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Run:
        """Run tasks and replace the updates after the first."""
        first: ClientResult | None = None
        for task, outcome in super().run(tasks, window=window):
            if is_update(task, outcome):
                assert isinstance(outcome, ClientResult)
                first = first or outcome
                model = unflatten(first.tensors).get("model", {})
                self.sent = self._runtime.setup.uploads.split({name: tensor.clone() for name, tensor in model.items()})
                outcome = _with_contents(outcome, first)
            yield task, outcome


class Rotating(InProcessEngine):
    """Replaces every update of a round with the next client's."""

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Run:
        """Run tasks and rotate the updates among the clients."""
        outcomes = list(super().run(tasks, window=window))
        if all(is_update(task, outcome) for task, outcome in outcomes):
            found = [outcome for _, outcome in outcomes if isinstance(outcome, ClientResult)]
            rotated = [*found[1:], *found[:1]]
            for (task, _), own, other in zip(outcomes, found, rotated, strict=True):
                yield task, _with_contents(own, other)
        else:
            yield from outcomes


@contextmanager
def last_client_first() -> Iterator[None]:
    """Let servers in this process take clients in the reverse order, in a block."""
    usual = cohort.dispatch_order
    with patch.object(cohort, "dispatch_order", lambda current: usual(current)[::-1]):
        yield


def is_update(task: ClientTask, outcome: Outcome) -> bool:
    """Return whether an outcome is a finished update."""
    return task.kind in ("fit_begin", "fit_resume") and isinstance(outcome, ClientResult) and "version" in outcome.meta


def _with_contents(own: ClientResult, other: ClientResult) -> ClientResult:
    """Return an update with another client's tensors and counts, but the same task and version of the state."""
    tensors = {name: tensor.clone() for name, tensor in other.tensors.items()}
    kept: dict[str, Any] = {key: own.meta[key] for key in ("version", "client") if key in own.meta}
    return replace(own, tensors=tensors, meta={**other.meta, **kept})
