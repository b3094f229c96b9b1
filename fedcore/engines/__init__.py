"""Engines run client tasks and stream back results; they know nothing of methods.

An engine takes a :class:`WorkerSpec` and keeps to :class:`Engine`; a worker makes a :class:`ClientRuntime` of the
specification and lets it handle tasks. ``pack_*`` and ``unpack_*`` turn what travels into tensors and JSON, ``dumps``
and ``loads`` turn these into bytes.
"""

from __future__ import annotations

from fedcore.client.messages import ClientFailure, ClientResult, ClientTask, FailureKind, Outcome
from fedcore.client.runtime import ClientRuntime
from fedcore.client.shared_payload import SharedPayload
from fedcore.client.worker_spec import WorkerSpec, pack_worker_spec, unpack_worker_spec
from fedcore.engines.channel import pack_error, pack_outcome, pack_task, remove_abandoned, unpack_outcome, unpack_task
from fedcore.engines.dispatch import Dispatcher, Pair, in_window
from fedcore.engines.local import ALLOCATOR, InProcessEngine, cores
from fedcore.engines.protocol import Engine
from fedcore.storage.serial import dumps, loads

__all__ = [
    "ALLOCATOR",
    "ClientFailure",
    "ClientResult",
    "ClientRuntime",
    "ClientTask",
    "Dispatcher",
    "Engine",
    "FailureKind",
    "InProcessEngine",
    "Outcome",
    "Pair",
    "SharedPayload",
    "WorkerSpec",
    "cores",
    "dumps",
    "in_window",
    "loads",
    "pack_error",
    "pack_outcome",
    "pack_task",
    "pack_worker_spec",
    "remove_abandoned",
    "unpack_outcome",
    "unpack_task",
    "unpack_worker_spec",
]
