"""The messages between the server and its clients, and how they become named tensors and JSON.

All messages have this one form, whatever carries them (:mod:`fedcore.base.serial` turns it into bytes), and every
packing function stands beside its inverse. Groups of tensors are joined into names ``group/name`` by
:func:`fedcore.base.tensors.flatten`. The worker specification is packed beside its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from fedcore.base.errors import FedcoreError, PluginContractError, RunDirectoryError, StorageError
from fedcore.base.tensors import flatten, unflatten
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.models.placement import Placement

TaskKind = Literal["fit_begin", "fit_resume", "ask", "evaluate", "end_session", "bundle"]
BUNDLE: TaskKind = "bundle"
"""A task of the local engine that holds others (:mod:`fedcore.engines.bundles`); no client sees one."""

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

    :param id: unique in a run; the server matches results and drops duplicates by it.
    :param session: name of the client's training between ``fit_begin`` and its last ``fit_resume``.
    :param version: of the client's state to start from; None for the empty one.
    :param shared: key of the shared payload, which the engine received with ``share``.
    :param tensors: may be computed at each reading, so that no more tasks' tensors are in memory than are sent at once:
        an engine reads them once, when it sends the task (:func:`pack_task`).
    """

    id: str
    kind: TaskKind
    client: int
    round: int
    session: str | None = None
    version: int | None = None
    shared: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResult:
    """The result of a task: named tensors and JSON."""

    task_id: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientFailure:
    """The reason why a task has no result."""

    task_id: str
    kind: FailureKind
    message: str


Outcome = ClientResult | ClientFailure


_STORAGE = {cls.__name__: cls for cls in (RunDirectoryError, StorageError)}


def pack_task(task: ClientTask) -> tuple[Tensors, dict[str, Any]]:
    """Split a task into tensors and JSON; its tensors are read once."""
    meta = dict(vars(task))
    return dict(meta.pop("tensors").items()), meta


def unpack_task(tensors: Tensors, meta: dict[str, Any]) -> ClientTask:
    """Join what :func:`pack_task` split."""
    return ClientTask(**meta, tensors=tensors)


def pack_outcome(outcome: Outcome) -> tuple[str, Tensors, dict[str, Any]]:
    """Split an outcome into its kind (``result``, ``failure``), tensors and JSON."""
    if isinstance(outcome, ClientFailure):
        return "failure", {}, asdict(outcome)
    return "result", outcome.tensors, {"task_id": outcome.task_id, "meta": outcome.meta}


def unpack_outcome(kind: str, tensors: Tensors, meta: Mapping[str, Any]) -> Outcome:
    """Join what :func:`pack_outcome` split."""
    if kind == "failure":
        return ClientFailure(**meta)
    return ClientResult(meta["task_id"], tensors, meta["meta"])


def pack_update(update: ClientUpdate, version: int | None) -> tuple[Tensors, dict[str, Any]]:
    """Split an update into tensors and JSON.

    :param version: of the client's state after the training; None where it is empty.
    :raises PluginContractError: a plugin's payload holds something other than tensors.
    """
    payload, rest = flatten(update.payload)
    if rest:
        plugin, values = next(iter(rest.items()))
        raise PluginContractError.of(plugin, f"puts {next(iter(values))!r} into its payload", expected="a tensor")
    tensors, _ = flatten({"model": update.model, "payload": payload})
    return tensors, {
        "client": update.client,
        "samples": update.samples,
        "steps": update.steps,
        "lr": update.lr,
        "momentum": update.momentum,
        "metrics": dict(update.metrics),
        "version": version,
        "frozen": sorted(update.frozen),
    }


def unpack_update(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ClientUpdate:
    """Join what :func:`pack_update` split.

    :param meta: its values are taken as they are; :class:`fedcore.server.validation.UpdateValidator` checks them.
    :raises ValueError: there are tensors outside of the model and the payload.
    """
    groups = unflatten(tensors)
    unexpected = sorted(set(groups) - {"model", "payload"})
    if unexpected:
        raise ValueError(f"sent tensors under {unexpected[0]!r}; an update has 'model' and 'payload'")
    return ClientUpdate(
        client=meta["client"],
        model=groups.get("model", {}),
        samples=meta["samples"],
        steps=meta["steps"],
        lr=meta["lr"],
        momentum=meta["momentum"],
        payload=unflatten(groups.get("payload", {})),
        metrics=meta["metrics"],
        frozen=frozenset(meta["frozen"]),
    )


def pack_error(error: FedcoreError) -> dict[str, Any]:
    """Return an error that ends the run as JSON."""
    where = {"plugin": getattr(error, "plugin", None), "hook": getattr(error, "hook", None)}
    return {"type": type(error).__name__, "message": str(error), **where}


def unpack_error(meta: Mapping[str, Any]) -> FedcoreError:
    """Return the error that :func:`pack_error` was given; a type other than those of storage is a contract error."""
    if meta["type"] in _STORAGE:
        return _STORAGE[meta["type"]](meta["message"])
    return PluginContractError(meta["message"], plugin=meta["plugin"], hook=meta["hook"])


def pack_shared(
    model: Tensors, broadcasts: Mapping[str, Tensors], lr: float, fixed: str = ""
) -> tuple[Tensors, dict[str, Any]]:
    """Return a shared payload as named tensors and JSON.

    :param model: the shared parameters and buffers; ``broadcasts`` tensors by plugin; ``lr`` the round's learning rate.
    :param fixed: digest of the parameters that do not travel; empty without any.
    """
    tensors, _ = flatten({"model": model, "broadcast": flatten(broadcasts)[0]})
    return tensors, {"lr": lr, **({"fixed": fixed} if fixed else {})}


class SharedPayload:
    """A shared payload unpacked into the device's own memory.

    :param tensors: as :func:`pack_shared` returned them; ``meta`` likewise.
    """

    def __init__(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], placement: Placement) -> None:
        groups = unflatten({name: tensor.to(placement.device, copy=True) for name, tensor in tensors.items()})
        self.model: Tensors = placement.weights(groups.get("model", {}))
        self.received: dict[str, Tensors] = unflatten(groups.get("broadcast", {}))
        self.lr = float(meta["lr"])
        self.fixed = str(meta.get("fixed", ""))
