"""The messages between the server and its clients, the site of the clients, and the protocol of the engines.

In the server's process a message is handed over unchanged. An engine whose clients are in other processes packs it into
named tensors and JSON once, sends these, and unpacks them once in the other process. Each packing function below stands
next to its inverse. :func:`fedcore.base.tensors.flatten` joins groups of tensors into names ``group/name``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import FedcoreError, PluginContractError, RunDirectoryError, StorageError
from fedcore.base.tensors import flatten, unflatten
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
    """Runs client tasks: exactly one outcome per task. A failure of a client is an outcome, never an exception."""

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


SITE = "site"


def pack_site(site: ClientSite) -> Tensors:
    """Return a site as tensors: its data, and the bytes of everything else, for the program's own processes.

    The bytes also hold the objects that the program gave to its run.
    """
    tensors: Tensors = {}

    def apart(part: Any) -> str | None:
        if type(part) is not Tensor or not part.is_cpu or part.layout is not torch.strided or part.requires_grad:
            return None
        tensors[f"{id(part)}"] = part
        return f"{id(part)}"

    content = registry.pickled(site, apart)
    return {**tensors, SITE: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def unpack_site(tensors: Tensors) -> ClientSite:
    """Join a site that :func:`pack_site` split, without copying its data; see :func:`fedcore.base.registry.unpickled`.

    :raises ConfigError: a part of it cannot be loaded here.
    """
    site: ClientSite = registry.unpickled(tensors[SITE].numpy().tobytes(), tensors.__getitem__)
    return site


def pack_task(task: ClientTask) -> tuple[Tensors, dict[str, Any]]:
    """Split a task into tensors and JSON."""
    meta = dict(vars(task.complete()))
    del meta["compute"]
    return meta.pop("tensors"), meta


def unpack_task(tensors: Tensors, meta: Mapping[str, Any]) -> ClientTask:
    """Join a task that :func:`pack_task` split."""
    return ClientTask(**meta, tensors=tensors)


def pack_shared(payload: SharedPayload) -> tuple[Tensors, dict[str, Any]]:
    """Split a shared payload into tensors and JSON."""
    tensors, _ = flatten({"model": payload.model, "received": flatten(payload.received)[0]})
    return tensors, {"lr": payload.lr, "fixed": payload.fixed}


def unpack_shared(tensors: Tensors, meta: Mapping[str, Any]) -> SharedPayload:
    """Join a payload that :func:`pack_shared` split."""
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
    """Join an outcome that :func:`pack_outcome` split. :mod:`fedcore.server.validation` checks its content.

    :raises ValueError: these are not the parts of an outcome.
    """
    groups, values = unflatten(tensors), dict(meta)
    try:
        cls = _OUTCOMES[values.pop("outcome")]
        if cls is ClientUpdate:
            groups = {"model": {}, **groups, "payload": unflatten(groups.get("payload", {}))}
            values["frozen"] = frozenset(values["frozen"])
        elif cls in (Pause, Reply, Evaluation):
            groups.setdefault("tensors", {})
        outcome: Outcome = cls(**groups, **values)
    except (KeyError, TypeError) as error:  # a name is missing, unknown or repeated
        raise ValueError(f"not an outcome of a task: {error}") from error
    return outcome


_STORAGE = {cls.__name__: cls for cls in (RunDirectoryError, StorageError)}


def pack_error(error: FedcoreError) -> dict[str, Any]:
    """Return an error that ends the run, as JSON."""
    where = {"plugin": getattr(error, "plugin", None), "hook": getattr(error, "hook", None)}
    return {"type": type(error).__name__, "message": str(error), **where}


def unpack_error(meta: Mapping[str, Any]) -> FedcoreError:
    """Return an error that :func:`pack_error` packed. Any type but an error of storage becomes a contract error."""
    if meta["type"] in _STORAGE:
        return _STORAGE[meta["type"]](meta["message"])
    return PluginContractError(meta["message"], plugin=meta["plugin"], hook=meta["hook"])
