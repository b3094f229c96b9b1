"""What the server and its clients send each other, and the protocol of the engines that carry it.

In the server's process a message is handed over as it is. An engine whose clients are in other processes packs it into
named tensors and JSON, sends these, and unpacks them there: once each, by the functions below, where each packing
function stands next to its inverse. Groups of tensors are joined into names ``group/name`` by
:func:`fedcore.base.tensors.flatten`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from fedcore.base.errors import FedcoreError, PluginContractError, RunDirectoryError, StorageError
from fedcore.base.tensors import flatten, unflatten
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.models.placement import Placement

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
"""Why a task has no result; ``diverged`` is a loss or a model that is not finite. The last three come from
the simulated system (:mod:`fedcore.server.system`)."""


@dataclass(frozen=True)
class ClientTask:
    """One piece of work for one client.

    :param id: unique in a run; the server finds the task of an outcome by it.
    :param session: name of the client's training between ``fit_begin`` and its last ``fit_resume``.
    :param version: of the client's state to start from; None for the empty one.
    :param shared: key of the shared payload, which the engine received with ``share``.
    :param tensors: what goes to this client alone.
    :param compute: makes the tensors when an engine sends the task, so that no more tasks' tensors are in memory than
        are sent at once; see :meth:`complete`.
    """

    id: str
    kind: TaskKind
    client: int
    round: int
    session: str | None = None
    version: int | None = None
    shared: str | None = None
    tensors: Tensors = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    compute: Callable[[], Tensors] | None = None

    def complete(self) -> ClientTask:
        """Return the task with its tensors; an engine calls this once, when it sends the task."""
        return self if self.compute is None else replace(self, tensors=self.compute(), compute=None)


@dataclass(frozen=True)
class SharedPayload:
    """What a round or an evaluation sends to all clients.

    :param model: the shared parameters and buffers.
    :param received: the broadcasts, by plugin.
    :param lr: the round's learning rate.
    :param fixed: digest of the parameters that do not travel; empty without any.
    """

    model: Tensors
    received: Mapping[str, Tensors]
    lr: float
    fixed: str = ""

    def copy_to(self, placement: Placement) -> SharedPayload:
        """Return a copy in the device's own memory."""

        def copied(tensors: Tensors) -> Tensors:
            return {name: tensor.to(placement.device, copy=True) for name, tensor in tensors.items()}

        received = {plugin: copied(tensors) for plugin, tensors in self.received.items()}
        return replace(self, model=placement.weights(copied(self.model)), received=received)


@dataclass(frozen=True)
class Pause:
    """A client waits at an exchange, before a local epoch, and shows these tensors of its model."""

    epoch: int
    tensors: Tensors


@dataclass(frozen=True)
class Reply:
    """A client's reply to a question of the server."""

    tensors: Tensors


@dataclass(frozen=True)
class Evaluation:
    """A client's counts by protocol, and why its own model has none; empty where it has."""

    counts: dict[str, Any]
    failed: str = ""


@dataclass(frozen=True)
class ClientFailure:
    """The reason why a task has no result."""

    kind: FailureKind
    message: str


Outcome = ClientUpdate | Pause | Reply | Evaluation | ClientFailure
"""What becomes of a task: the first two of training, then of a question and of an evaluation, the last of any."""
Pair = tuple[ClientTask, Outcome]


class Engine(Protocol):
    """Runs client tasks: exactly one outcome per task. A failure of a client is an outcome, never an exception."""

    workers: int
    """How many tasks run side by side."""

    def share(self, key: str, payload: SharedPayload) -> None:
        """Make a payload available to all clients under a key, sent once."""

    def unshare(self, key: str) -> None:
        """Drop a shared payload; idempotent."""

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks in the given order of dispatch and yield each with its outcome as it finishes.

        :param window: dispatch pauses while this many finished tasks wait for an earlier one; None: never.
        """

    def close(self) -> None:
        """Stop all workers and free the shared payloads; idempotent."""


def pack_task(task: ClientTask) -> tuple[Tensors, dict[str, Any]]:
    """Split a task into tensors and JSON."""
    meta = dict(vars(task.complete()))
    del meta["compute"]
    return meta.pop("tensors"), meta


def unpack_task(tensors: Tensors, meta: Mapping[str, Any]) -> ClientTask:
    """Join what :func:`pack_task` split."""
    return ClientTask(**meta, tensors=tensors)


def pack_shared(payload: SharedPayload) -> tuple[Tensors, dict[str, Any]]:
    """Split a shared payload into tensors and JSON."""
    tensors, _ = flatten({"model": payload.model, "received": flatten(payload.received)[0]})
    return tensors, {"lr": payload.lr, "fixed": payload.fixed}


def unpack_shared(tensors: Tensors, meta: Mapping[str, Any]) -> SharedPayload:
    """Join what :func:`pack_shared` split."""
    groups = unflatten(tensors)
    return SharedPayload(groups.get("model", {}), unflatten(groups.get("received", {})), meta["lr"], meta["fixed"])


_OUTCOMES = {cls.__name__: cls for cls in (ClientUpdate, Pause, Reply, Evaluation, ClientFailure)}


def pack_outcome(outcome: Outcome) -> tuple[Tensors, dict[str, Any]]:
    """Split an outcome into tensors and JSON."""
    meta = {"outcome": type(outcome).__name__, **vars(outcome)}
    groups: dict[str, Any] = {name: meta.pop(name) for name in ("model", "payload", "tensors") if name in meta}
    if isinstance(outcome, ClientUpdate):
        groups["payload"], _ = flatten(outcome.payload)
        meta["frozen"] = sorted(outcome.frozen)
    return flatten(groups)[0], meta


def unpack_outcome(tensors: Tensors, meta: Mapping[str, Any]) -> Outcome:
    """Join what :func:`pack_outcome` split; the server checks what the outcome says (:mod:`fedcore.server.validation`).

    :raises ValueError: these are no parts of an outcome.
    """
    groups, values = unflatten(tensors), dict(meta)
    try:
        cls = _OUTCOMES[values.pop("outcome")]
        if cls is ClientUpdate:
            groups = {"model": {}, **groups, "payload": unflatten(groups.get("payload", {}))}
            values["frozen"] = frozenset(values["frozen"])
        elif cls in (Pause, Reply):
            groups.setdefault("tensors", {})
        outcome: Outcome = cls(**groups, **values)
    except (KeyError, TypeError) as error:  # a name is missing, unknown or there twice
        raise ValueError(f"no outcome of a task: {error}") from error
    return outcome


_STORAGE = {cls.__name__: cls for cls in (RunDirectoryError, StorageError)}


def pack_error(error: FedcoreError) -> dict[str, Any]:
    """Return an error that ends the run as JSON."""
    where = {"plugin": getattr(error, "plugin", None), "hook": getattr(error, "hook", None)}
    return {"type": type(error).__name__, "message": str(error), **where}


def unpack_error(meta: Mapping[str, Any]) -> FedcoreError:
    """Return the error that :func:`pack_error` was given; a type other than those of storage is a contract error."""
    if meta["type"] in _STORAGE:
        return _STORAGE[meta["type"]](meta["message"])
    return PluginContractError(meta["message"], plugin=meta["plugin"], hook=meta["hook"])
