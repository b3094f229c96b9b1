"""Engines run client tasks and stream back outcomes. They know nothing of methods.

An engine takes a :class:`ClientSite` and implements :class:`Engine`. A worker makes a :class:`ClientRuntime` from the
site and lets it handle tasks. ``dumps`` and ``loads`` turn tensors and JSON into bytes and back; the package
fedcore-workers turns messages into tensors and JSON and back.
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
    "unflatten",
]
