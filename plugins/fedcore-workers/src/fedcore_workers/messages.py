"""Messages between processes: each as named tensors and JSON, and a site as tensors.

Each packing function stands next to its inverse. :func:`fedcore.engines.flatten` joins groups of tensors into names
``group/name``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fedcore import ClientUpdate, FedcoreError, PluginContractError, RunDirectoryError, Tensors
from fedcore.engines import (
    ClientFailure,
    ClientSite,
    ClientTask,
    Evaluation,
    Outcome,
    Pause,
    Reply,
    SharedPayload,
    flatten,
    unflatten,
)
from fedcore.tools import StorageError, code_in, registry
from fedcore_workers.objects import pickled, refuse_edited, unpickled

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

    config, lent = site.config, [value for (kind, _), value in registry.LENT.items() if kind != "dataset"]
    values = [*lent, *(registry.resolve("plugin", name) for name in config.plugins)]
    modules = [getattr(value, "__module__", None) or "" for value in values]
    refuse_edited([*modules, *(name.partition(":")[2] for name in code_in(config))])
    content = pickled(site, apart)
    return {**tensors, SITE: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def unpack_site(tensors: Tensors) -> ClientSite:
    """Join a site that :func:`pack_site` split, without copying its data; see :func:`unpickled`.

    :raises ConfigError: a part of it cannot be loaded here.
    """
    site: ClientSite = unpickled(tensors[SITE].numpy().tobytes(), tensors.__getitem__)
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


UPDATE = {"outcome", *(field.name for field in fields(ClientUpdate))} - {"model", "payload"}
"""The names of an update's values next to its tensors."""
_OUTCOMES = {cls.__name__: cls for cls in (ClientUpdate, Pause, Reply, Evaluation, ClientFailure)}


def pack_outcome(outcome: Outcome) -> tuple[Tensors, dict[str, Any]]:
    """Split an outcome into tensors and JSON."""
    meta = {"outcome": type(outcome).__name__, **vars(outcome)}
    groups: dict[str, Any] = {name: meta.pop(name) for name in ("model", "payload", "tensors") if name in meta}
    if isinstance(outcome, ClientUpdate):
        if outcome.payload:
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
            groups.setdefault("model", {})
            groups["payload"] = unflatten(groups["payload"]) if "payload" in groups else {}
            values["frozen"] = frozenset(values["frozen"])
        elif cls in (Pause, Reply, Evaluation):
            groups.setdefault("tensors", {})
        outcome: Outcome = cls(**groups, **values)
    except (KeyError, TypeError) as error:  # a name is missing, unknown or repeated
        raise ValueError(f"not an outcome of a task: {error}") from error
    return outcome


def pack_tasks(tasks: Sequence[ClientTask]) -> tuple[Tensors, Any]:
    """Split the tasks of one message into tensors and JSON. Only a single one has tensors."""
    packed = [pack_task(task) for task in tasks]
    return packed[0][0], _columns([meta for _, meta in packed])


def unpack_tasks(tensors: Tensors, columns: Mapping[str, Any]) -> list[ClientTask]:
    """Join tasks that :func:`pack_tasks` split."""
    return [unpack_task(tensors, meta) for meta in _rows(columns)]


def pack_outcomes(outcomes: Sequence[Outcome]) -> tuple[Tensors, Any]:
    """Split the outcomes of one message into tensors and JSON. Those of one form have one tensor (K, ...) per name."""
    packed = [pack_outcome(outcome) for outcome in outcomes]
    groups, metas = [tensors for tensors, _ in packed], [meta for _, meta in packed]
    forms = [[(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()] for tensors in groups]
    if any(meta.keys() != metas[0].keys() for meta in metas) or any(form != forms[0] for form in forms):
        return flatten({str(k): tensors for k, tensors in enumerate(groups)})[0], metas
    return {name: _stacked([tensors[name] for tensors in groups]) for name in groups[0]}, _columns(metas)


def unpack_outcomes(tensors: Tensors, meta: Any) -> list[Outcome]:
    """Join outcomes that :func:`pack_outcomes` split.

    :raises ValueError: these are not the parts of outcomes.
    """
    if isinstance(meta, list):
        groups = unflatten(tensors)
        return [unpack_outcome(groups.get(f"{k}", {}), entry) for k, entry in enumerate(meta)]
    metas = _rows(meta)
    if metas[0].keys() == UPDATE and all(entry["outcome"] == "ClientUpdate" for entry in metas):
        return _updates(unflatten(tensors), metas)
    if not tensors:
        return [unpack_outcome({}, entry) for entry in metas]
    rows = zip(*(tensor.unbind() for tensor in tensors.values()), strict=True)
    return [unpack_outcome(dict(zip(tensors, row)), entry) for row, entry in zip(rows, metas, strict=True)]


def _columns(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mappings with the same names as one: the values that are one object in all, and lists of the others.

    Mappings and lists are not shared: who receives them may change them.
    """
    own = {name: [meta[name] for meta in metas] for name in metas[0]}
    shared = {
        name: values[0]
        for name, values in own.items()
        if len({*map(id, values)}) == 1 and not isinstance(values[0], Mapping | list)
    }
    own = {name: values for name, values in own.items() if name not in shared}
    return {"count": len(metas), "shared": shared, "own": own}


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the mappings that :func:`_columns` joined."""
    own, shared = columns["own"], columns["shared"]
    rows = zip(*own.values(), strict=True) if own else itertools.repeat((), columns["count"])
    return [shared | dict(zip(own, values)) for values in rows]


def _updates(groups: Mapping[str, Any], metas: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Join updates of one form, as :func:`unpack_outcome` does it, in a third of the time."""
    model = {name: tensor.unbind() for name, tensor in groups.get("model", {}).items()}
    sent = unflatten(groups.get("payload", {}))
    payload = {plugin: {name: tensor.unbind() for name, tensor in own.items()} for plugin, own in sent.items()}
    updates: list[Outcome] = []
    for k, meta in enumerate(metas):
        del meta["outcome"]
        meta["frozen"] = frozenset(meta["frozen"])
        meta["model"] = {name: rows[k] for name, rows in model.items()}
        meta["payload"] = {plugin: {name: rows[k] for name, rows in own.items()} for plugin, own in payload.items()}
        update = object.__new__(ClientUpdate)  # __init__ of a frozen class takes longer than all the rest
        vars(update).update(meta)
        updates.append(update)
    return updates


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Return tensors as one, (K, ...), without a copy if they are its rows already."""
    first, memory = tensors[0], tensors[0].untyped_storage().data_ptr()
    for k, tensor in enumerate(tensors):
        follows = tensor.data_ptr() == first.data_ptr() + k * first.nbytes and tensor.is_contiguous()
        if not follows or tensor.untyped_storage().data_ptr() != memory:
            return torch.stack(tensors)
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


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
