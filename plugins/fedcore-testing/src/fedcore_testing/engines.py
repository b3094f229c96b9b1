"""In-process engines that record or replace clients' messages, and another order of these, for tests of aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from fedcore import ClientUpdate, Tensors
from fedcore.engines import ClientSite, ClientTask, InProcessEngine, Pair, SharedPayload
from fedcore.server import Round
from fedcore_testing.fingerprint import by_path, clone


class Listening(InProcessEngine):
    """Keeps every broadcast and every finished update."""

    def __init__(self, site: ClientSite) -> None:
        super().__init__(site)
        self.broadcasts: list[Tensors] = []
        """What all clients got, in order, by ``plugin/name``."""
        self.messages: dict[tuple[int, int], Tensors] = {}
        """What single clients got next to it to train with, by round and client."""
        self.updates: dict[tuple[int, int], ClientUpdate] = {}
        """The updates by round and client."""

    def share(self, key: str, payload: SharedPayload) -> None:
        """Share a payload and keep the plugins' tensors."""
        self.broadcasts.append(clone(by_path(payload.received)))
        super().share(key, payload)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks and keep the messages and the updates."""
        for task, outcome in super().run(tasks, window=window):
            if task.kind == "fit_begin":
                self.messages[task.round, task.client] = clone(task.complete().tensors)
            if isinstance(outcome, ClientUpdate):
                self.updates[task.round, task.client] = _copy(outcome)
            yield task, outcome


class Echoing(InProcessEngine):
    """Replaces the tensors and counts of every update of a round with the first update's."""

    def __init__(self, site: ClientSite) -> None:
        super().__init__(site)
        self.rounds: list[tuple[Tensors, Tensors]] = []
        """The model that went to the clients and the one in their updates, by name, round by round."""

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks and replace the updates after the first."""
        first: ClientUpdate | None = None
        for task, outcome in super().run(tasks, window=window):
            if isinstance(outcome, ClientUpdate):
                if first is None:
                    first = _copy(outcome)
                    sent = self._runtime.setup.uploads.named(clone(first.model))
                    self.rounds.append((self._shared[task.shared or ""].model, sent))
                outcome = replace(_copy(first), client=outcome.client, version=outcome.version)
            yield task, outcome


@contextmanager
def last_client_first() -> Iterator[None]:
    """Let servers in this process take clients in the reverse order, also in ``server.cohort``, in a block."""
    usual, select = Round.dispatch_order, Round.select

    def reversed_select(scope: Round, clients: Mapping[int, int | None]) -> None:
        select(scope, dict([*clients.items()][::-1]))

    with (
        patch.object(Round, "dispatch_order", lambda scope: usual(scope)[::-1]),
        patch.object(Round, "select", reversed_select),
    ):
        yield


def _copy(update: ClientUpdate) -> ClientUpdate:
    payload = {plugin: clone(tensors) for plugin, tensors in update.payload.items()}
    return replace(update, model=clone(update.model), payload=payload)
