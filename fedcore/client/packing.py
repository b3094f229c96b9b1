"""Messages between server and clients as named tensors and JSON: every packing function beside its inverse.

All messages have this one form, whatever carries them (:mod:`fedcore.storage.serial` turns it into bytes). Groups of
tensors are joined into names ``group/name`` by :func:`fedcore.storage.state.flatten`. The worker specification, the
shared payload and a client's kept models have the same form and are packed beside their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fedcore.base.errors import FedcoreError, PluginContractError, RunDirectoryError, StorageError
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.client.messages import ClientFailure, ClientResult, ClientTask, Outcome
from fedcore.storage.state import flatten, unflatten

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
