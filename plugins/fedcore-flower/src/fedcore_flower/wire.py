"""The messages between the server and a client's training process. A message is a mapping of names to blobs.

A blob holds tensors and JSON (:mod:`fedcore.base.serial`). The blob ``head`` is the request or the answer. A request
also has the blob ``setup`` (the description of the run) or ``shared`` (the global model of a round) if the client does
not have it yet. Flower's messages and the socket of the training process carry the blobs and never decode them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor

from fedcore import FedcoreError, Tensors
from fedcore.engines import ClientFailure, ClientTask, FailureKind, Outcome, dumps, loads
from fedcore_workers import pack_outcome, pack_task, unpack_outcome, unpack_task

HEAD, SETUP, SHARED = "head", "setup", "shared"
PROTOCOL = 7
"""The version of the messages. The server and the client must have the same."""

Blobs = Mapping[str, bytes]

_MAX_TEXT = 2000


class WireError(FedcoreError):
    """A message that cannot be decoded, or that is not expected."""


def pack(op: str, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> bytes:
    """Encode a request or an answer.

    :param op: what it is, such as ``task`` or ``outcome``.
    """
    return dumps(tensors or {}, {"op": op, "protocol": PROTOCOL, **header})


def unpack(blobs: Blobs, name: str = HEAD) -> tuple[str, Tensors, dict[str, Any]]:
    """Decode one blob of a message into its ``op``, its tensors and its header.

    :raises WireError: the blob is missing or damaged, or has another version of the protocol.
    """
    if name not in blobs:
        raise WireError(f"a message without {name!r}")
    try:
        tensors, header = loads(blobs[name])
    except ValueError as error:
        raise WireError(f"a message whose {name!r} cannot be read: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("op"), str):
        raise WireError(f"a message whose {name!r} has no 'op'")
    if header.get("protocol") != PROTOCOL:
        raise WireError(
            f"a message of protocol {header.get('protocol')!r}, but protocol {PROTOCOL} is expected: install the same "
            "version of fedcore-flower at the server and at the client"
        )
    return header["op"], tensors, header


def pack_request(task: ClientTask, *, attempt: str, run: str) -> bytes:
    """Encode a task.

    :param attempt: an id of the server's process. A task that a resumed run repeats is therefore a new task, and its
        answer is computed again.
    :param run: the id of the run. The client must be set up for it.
    """
    tensors, meta = pack_task(task)
    return pack("task", tensors, task=meta, attempt=attempt, run=run)


def unpack_request(tensors: Tensors, header: Mapping[str, Any]) -> ClientTask:
    """Decode a task of :func:`pack_request`.

    :raises WireError: fields are missing or unknown.
    """
    try:
        return unpack_task(tensors, dict(header["task"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a task that cannot be decoded: {error}") from error


def pack_answer(task: ClientTask, outcome: Outcome) -> bytes:
    """Encode a task's outcome."""
    tensors, meta = pack_outcome(outcome)
    return pack("outcome", tensors, outcome=meta, task=task.id)


def unpack_answer(task: ClientTask, op: str, tensors: Tensors, header: Mapping[str, Any]) -> Outcome:
    """Decode a client's answer to a task.

    The kind of a failure is checked here. The server checks the content of an update later.

    :raises WireError: it is not an outcome, or it is the outcome of another task.
    """
    meta = header.get("outcome")
    if not isinstance(meta, dict) or op != "outcome":
        raise WireError(f"an answer of kind {op[:40]!r} to a task")
    if header.get("task") != task.id:
        raise WireError(f"an answer to task {str(header.get('task'))[:40]!r} instead of {task.id!r}")
    try:
        outcome = unpack_outcome(tensors, meta)
    except ValueError as error:
        raise WireError(f"an answer that cannot be decoded: {error}") from error
    if isinstance(outcome, ClientFailure):
        kind = outcome.kind if outcome.kind in get_args(FailureKind) else "rejected"
        return ClientFailure(kind, str(outcome.message))
    return outcome


def printable(text: object) -> str:
    """Return a text of the other side for terminals and records: shortened and without control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text)[:_MAX_TEXT])
