"""What every engine is: tasks in, exactly one result or failure per task out, as values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from fedcore.config import RunConfig
    from fedcore.data import Dataset, Partition

TaskKind = Literal["fit_begin", "fit_resume", "ask", "evaluate", "end_session"]
FailureKind = Literal[
    "raised",
    "timeout",
    "worker_lost",
    "session_lost",
    "unreachable",
    "rejected",
    "diverged",
    "no_steps",
    "unavailable",
    "dropped",
    "deadline",
]
"""Why a client gave nothing; ``diverged`` is a loss, a model or a payload that is not finite. The last three are the
simulated system's (``fedcore.system``)."""


@dataclass(frozen=True)
class ClientTask:
    """One piece of work for one client.

    :param id: unique in a run; results are matched and duplicates dropped by it.
    :param session: names the live training of a client between ``fit_begin`` and its last ``fit_resume``.
    :param state_round: version of the client's state to start from; None for the empty one.
    :param shared: key of a payload that the engine was given once with ``share``.
    """

    id: str
    kind: TaskKind
    client: int
    round: int
    session: str | None = None
    state_round: int | None = None
    shared: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResult:
    """What a task gave: named tensors and JSON."""

    task_id: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientFailure:
    """Why a task gave nothing."""

    task_id: str
    kind: FailureKind
    message: str


Outcome = ClientResult | ClientFailure


@dataclass(frozen=True)
class Site:
    """What an engine needs to set clients up, wherever they run.

    :param state_dir: folder of the clients' states.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    state_dir: Path


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
