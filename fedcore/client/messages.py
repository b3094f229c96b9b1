"""The messages between the server and its clients, the site of the clients, and the protocol of the engines.

In the server's process a message is handed over unchanged. An engine whose clients are in other processes packs it into
named tensors and JSON once, sends these, and unpacks them once in the other process: see the package fedcore-workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fedcore.base.config import RunConfig
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.data import Dataset, Partition
from fedcore.models.placement import Placement


@dataclass(frozen=True)
class ClientSite:
    """Everything that an engine needs to set up clients in any process."""

    config: RunConfig
    dataset: Dataset
    partition: Partition
    state_dir: Path
    """The folder of the clients' states."""


TaskKind = Literal["fit_begin", "fit_resume", "ask", "evaluate"]

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
"""Why a task has no result.

``diverged`` is a loss or a model that is not finite. The last three kinds come from the simulated system
(:mod:`fedcore.server.system`).
"""


@dataclass(frozen=True)
class ClientTask:
    """One piece of work for one client."""

    id: str
    """Unique in a run. The server uses it to find the task of an outcome."""
    kind: TaskKind
    client: int
    round: int
    session: str | None = None
    """The name of the client's training from ``fit_begin`` to its last ``fit_resume``."""
    version: int | None = None
    """The version of the client's state to start from; None for the empty state."""
    shared: str | None = None
    """The key of the shared payload, which the engine received with ``share``."""
    tensors: Tensors = field(default_factory=dict)
    """The tensors for this client alone."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    compute: Callable[[], Tensors] | None = None
    """Makes the tensors when an engine sends the task, so that only the tensors of tasks in flight take memory."""

    def complete(self) -> ClientTask:
        """Return the task with its tensors. An engine calls this once, when it sends the task."""
        return self if self.compute is None else replace(self, tensors=self.compute(), compute=None)


@dataclass(frozen=True)
class SharedPayload:
    """The tensors that a round or an evaluation sends to all clients."""

    model: Tensors
    """The shared parameters and buffers."""
    received: Mapping[str, Tensors]
    """The broadcasts, by plugin."""
    lr: float
    """The learning rate of the round."""
    fixed: str = ""
    """The digest of the parameters that do not travel; empty if all travel."""

    def copy_to(self, placement: Placement) -> SharedPayload:
        """Return a copy in the device's own memory."""

        def copied(tensors: Tensors) -> Tensors:
            return {name: tensor.to(placement.device, copy=True) for name, tensor in tensors.items()}

        received = {plugin: copied(tensors) for plugin, tensors in self.received.items()}
        return replace(self, model=placement.weights(copied(self.model)), received=received)


@dataclass(frozen=True)
class Pause:
    """A client waits at an exchange, before a local epoch. It sends these tensors of its model."""

    epoch: int
    tensors: Tensors


@dataclass(frozen=True)
class Reply:
    """A client's reply to a question of the server."""

    tensors: Tensors


@dataclass(frozen=True)
class Evaluation:
    """A client's counts by protocol: named tensors ``protocol/name`` of :class:`fedcore.base.metrics.Counts`."""

    tensors: Tensors
    failed: str = ""
    """Why the client's own model could not be evaluated; empty if it could."""


@dataclass(frozen=True)
class ClientFailure:
    """The reason why a task has no result."""

    kind: FailureKind
    message: str


Outcome = ClientUpdate | Pause | Reply | Evaluation | ClientFailure
"""The outcome of a task: of training, an update or a pause; of a question, a reply; an evaluation; or a failure."""
Pair = tuple[ClientTask, Outcome]


class Engine(Protocol):
    """Runs client tasks: exactly one outcome per task. A failure of a client is an outcome, never an exception.

    An engine that hands tasks over several at a time also has ``together``, their number, so that hooks can add up
    what arrives together.
    """

    workers: int
    """The number of tasks that run side by side."""

    def share(self, key: str, payload: SharedPayload) -> None:
        """Make a payload available to all clients under a key. It is sent once."""

    def unshare(self, key: str) -> None:
        """Drop a shared payload. A second call does nothing."""

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Dispatch tasks in the given order; yield each with its outcome when it finishes.

        :param window: dispatch pauses while this many finished tasks wait for an earlier one. None: it never pauses.
        """

    def close(self) -> None:
        """Stop all workers and free the shared payloads. A second call does nothing."""
