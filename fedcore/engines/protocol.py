"""The protocol of engines: tasks in, exactly one result or failure per task out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from fedcore.client.messages import ClientTask, Outcome


class Engine(Protocol):
    """Runs client tasks. A failure of a client is an outcome, never an exception."""

    workers: int
    """How many tasks run side by side."""

    def share(self, key: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Make a payload available to all clients under a key, sent once."""

    def unshare(self, key: str) -> None:
        """Drop a shared payload; idempotent."""

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[tuple[ClientTask, Outcome]]:
        """Run tasks in the given order of dispatch and yield each with its outcome as it finishes.

        :param window: dispatch pauses while this many finished tasks wait for an earlier one; None: never.
        """

    def close(self) -> None:
        """Stop all workers and free the shared payloads; idempotent."""
