"""Engines run client tasks and stream back results; they know nothing of methods.

An engine takes a :class:`WorkerSpec` and keeps to :class:`Engine`; a worker makes a :class:`ClientRuntime` of the
specification and lets it handle tasks. ``pack_*`` and ``unpack_*`` turn messages into tensors and JSON and back,
``dumps`` and ``loads`` turn these into bytes and back.

The names are imported on first use: a worker process arranges to end with its engine before it imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore.base.files import OwnedFolder as OwnedFolder
    from fedcore.base.files import remove_abandoned as remove_abandoned
    from fedcore.base.process import cores as cores
    from fedcore.base.serial import dumps as dumps
    from fedcore.base.serial import loads as loads
    from fedcore.client.messages import ClientFailure as ClientFailure
    from fedcore.client.messages import ClientResult as ClientResult
    from fedcore.client.messages import ClientTask as ClientTask
    from fedcore.client.messages import FailureKind as FailureKind
    from fedcore.client.messages import Outcome as Outcome
    from fedcore.client.messages import SharedPayload as SharedPayload
    from fedcore.client.messages import pack_error as pack_error
    from fedcore.client.messages import pack_outcome as pack_outcome
    from fedcore.client.messages import pack_task as pack_task
    from fedcore.client.messages import unpack_outcome as unpack_outcome
    from fedcore.client.messages import unpack_task as unpack_task
    from fedcore.client.runtime import ClientRuntime as ClientRuntime
    from fedcore.client.worker_spec import WorkerSpec as WorkerSpec
    from fedcore.client.worker_spec import pack_objects as pack_objects
    from fedcore.client.worker_spec import pack_worker_spec as pack_worker_spec
    from fedcore.client.worker_spec import unpack_objects as unpack_objects
    from fedcore.client.worker_spec import unpack_worker_spec as unpack_worker_spec
    from fedcore.engines.dispatch import Dispatcher as Dispatcher
    from fedcore.engines.dispatch import Pair as Pair
    from fedcore.engines.dispatch import in_window as in_window
    from fedcore.engines.in_process import InProcessEngine as InProcessEngine
    from fedcore.engines.local import ALLOCATOR as ALLOCATOR
    from fedcore.engines.protocol import Engine as Engine

_HOMES = {
    "ALLOCATOR": "engines.local",
    "ClientFailure": "client.messages",
    "ClientResult": "client.messages",
    "ClientRuntime": "client.runtime",
    "ClientTask": "client.messages",
    "Dispatcher": "engines.dispatch",
    "Engine": "engines.protocol",
    "FailureKind": "client.messages",
    "InProcessEngine": "engines.in_process",
    "Outcome": "client.messages",
    "OwnedFolder": "base.files",
    "Pair": "engines.dispatch",
    "SharedPayload": "client.messages",
    "WorkerSpec": "client.worker_spec",
    "cores": "base.process",
    "dumps": "base.serial",
    "in_window": "engines.dispatch",
    "loads": "base.serial",
    "pack_error": "client.messages",
    "pack_outcome": "client.messages",
    "pack_task": "client.messages",
    "pack_objects": "client.worker_spec",
    "pack_worker_spec": "client.worker_spec",
    "unpack_objects": "client.worker_spec",
    "remove_abandoned": "base.files",
    "unpack_outcome": "client.messages",
    "unpack_task": "client.messages",
    "unpack_worker_spec": "client.worker_spec",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedcore.engines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
