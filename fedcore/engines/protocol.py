"""What every engine is: tasks in, exactly one result or failure per task out, as values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fedcore.client.messages import ClientTask, Outcome

if TYPE_CHECKING:
    pass


class Engine(Protocol):
    """Runs client tasks. Never raises for a client: failures are values."""

    workers: int
    """How many tasks run side by side."""

    def share(self, key: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Make a payload known to all clients under a key, sent once."""

    def unshare(self, key: str) -> None:
        """Forget a shared payload; idempotent."""

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[tuple[ClientTask, Outcome]]:
        """Run tasks in the given order of dispatch and yield each with its outcome as it finishes.

        :param window: dispatch pauses while this many finished tasks wait for an earlier one; None: never.
        """

    def close(self) -> None:
        """Stop everything and free what was shared; idempotent."""
