"""What travels between the server and a client's resident process: named blobs, the first one the request itself.

A blob is tensors and JSON (``fedcore.base.serial``). ``head`` is the request or the answer. Beside it may go what
the other side has not yet: ``setup`` (the run), ``shared`` (the global model of a round). What carries them, Flower's
messages or a socket, looks into none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor

from fedcore import FedcoreError, Tensors
from fedcore.engines import (
    ClientFailure,
    ClientTask,
    FailureKind,
    Outcome,
    dumps,
    loads,
    pack_outcome,
    pack_task,
    unpack_outcome,
    unpack_task,
)

HEAD, SETUP, SHARED = "head", "setup", "shared"
PROTOCOL = 4
"""Both sides must speak the same; it changes when a message does."""

Blobs = Mapping[str, bytes]

_LONGEST = 2000
_KINDS = frozenset(get_args(FailureKind))


class WireError(FedcoreError):
    """Bytes that are no message of ours."""


def pack(op: str, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> bytes:
    """Encode a request or an answer."""
    return dumps(tensors or {}, {"op": op, "protocol": PROTOCOL, **header})


def unpack(blobs: Blobs, name: str = HEAD) -> tuple[str, Tensors, dict[str, Any]]:
    """Decode a blob: what it is, its tensors, its header.

    :raises WireError: it is missing, or none of ours.
    """
    if name not in blobs:
        raise WireError(f"a message without {name!r}")
    try:
        tensors, header = loads(blobs[name])
    except ValueError as error:
        raise WireError(f"{name!r} cannot be read: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("op"), str):
        raise WireError(f"{name!r} does not say what it is")
    if header.get("protocol") != PROTOCOL:
        raise WireError(
            f"the other side speaks protocol {header.get('protocol')!r}, this one {PROTOCOL}: install the same "
            "version of fedcore-flower on both"
        )
    return header["op"], tensors, header


def pack_request(task: ClientTask, *, attempt: str, run: str) -> bytes:
    """Encode a task.

    :param attempt: names this life of the server, so that a task that a restarted one repeats is a new one.
    :param run: the run that its client must be set up for.
    """
    tensors, meta = pack_task(task)
    return pack("task", tensors, task=meta, attempt=attempt, run=run)


def unpack_request(tensors: Tensors, header: Mapping[str, Any]) -> ClientTask:
    """Decode what :func:`pack_request` wrote.

    :raises WireError: it is something else.
    """
    try:
        return unpack_task(tensors, dict(header["task"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a task that is none: {error}") from error


def pack_answer(task: ClientTask, outcome: Outcome) -> bytes:
    """Encode a task's outcome."""
    tensors, meta = pack_outcome(outcome)
    return pack("outcome", tensors, outcome=meta, task=task.id)


def unpack_answer(task: ClientTask, op: str, tensors: Tensors, header: Mapping[str, Any]) -> Outcome:
    """Decode an outcome that a client claims to be this task's.

    What an update says is checked by the server; a failure's kind is checked here.

    :raises WireError: it is something else.
    """
    meta = header.get("outcome")
    if not isinstance(meta, dict) or op != "outcome":
        raise WireError(f"an answer of kind {op[:40]!r} to a task")
    if header.get("task") != task.id:
        raise WireError(f"an answer to task {str(header.get('task'))[:40]!r}, but was given {task.id!r}")
    try:
        outcome = unpack_outcome(tensors, meta)
    except ValueError as error:
        raise WireError(str(error)) from error
    if isinstance(outcome, ClientFailure):
        kind = outcome.kind if isinstance(outcome.kind, str) and outcome.kind in _KINDS else "rejected"
        return ClientFailure(kind, str(outcome.message))
    return outcome


def failure(task: ClientTask, kind: FailureKind, message: str) -> bytes:
    """Encode that a task gave nothing."""
    return pack_answer(task, ClientFailure(kind, message))


def shown(text: object) -> str:
    """Return what the other side said as it is printed and recorded: cut, and without control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text)[:_LONGEST])
