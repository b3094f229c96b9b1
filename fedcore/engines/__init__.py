"""Engines run client tasks and stream back outcomes. They know nothing of methods.

An engine takes a :class:`ClientSite` and implements :class:`Engine`. A worker makes a :class:`ClientRuntime` from the
site and lets it handle tasks. ``pack_*`` and ``unpack_*`` turn messages into tensors and JSON and back, and a site into
tensors and back. ``dumps`` and ``loads`` turn tensors and JSON into bytes and back.
"""

from fedcore.base.process import importing

with importing():  # a worker process begins here
    from fedcore.base.process import cores
    from fedcore.base.serial import dumps, loads
    from fedcore.base.tensors import flatten, unflatten
    from fedcore.client.messages import (
        ClientFailure,
        ClientSite,
        ClientTask,
        Engine,
        Evaluation,
        FailureKind,
        Outcome,
        Pair,
        Pause,
        Reply,
        SharedPayload,
        pack_error,
        pack_outcome,
        pack_shared,
        pack_site,
        pack_task,
        unpack_error,
        unpack_outcome,
        unpack_shared,
        unpack_site,
        unpack_task,
    )
    from fedcore.client.runtime import ClientRuntime
    from fedcore.engines.in_process import InProcessEngine, LocalEngine, alike, groups_of

__all__ = [
    "ClientFailure",
    "ClientRuntime",
    "ClientSite",
    "ClientTask",
    "Engine",
    "Evaluation",
    "FailureKind",
    "InProcessEngine",
    "LocalEngine",
    "Outcome",
    "Pair",
    "Pause",
    "Reply",
    "SharedPayload",
    "alike",
    "cores",
    "dumps",
    "flatten",
    "groups_of",
    "loads",
    "pack_error",
    "pack_outcome",
    "pack_shared",
    "pack_site",
    "pack_task",
    "unflatten",
    "unpack_error",
    "unpack_outcome",
    "unpack_shared",
    "unpack_site",
    "unpack_task",
]
