"""How the local engine and its workers talk: frames over a socket, large tensors through shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from fedcore.base.errors import FedcoreError, PluginContractError, RunDirectoryError, StorageError
from fedcore.base.tensors import bytes_of
from fedcore.client.messages import ClientFailure, ClientResult, ClientTask, Outcome
from fedcore.storage.serial import dumps, loads, read_tensors, write_tensors

INLINE_BYTES = 1 << 16

_STORAGE = {cls.__name__: cls for cls in (RunDirectoryError, StorageError)}


class Spool:
    """A folder in shared memory (/dev/shm where there is one with room) for tensors that processes exchange.

    Named after the process that owns it, so that one left behind by a killed process is found and deleted.
    """

    PREFIX = "fedcore-spool-"

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, needed: int) -> Spool:
        """Make a spool with room for ``needed`` bytes and delete abandoned ones."""
        shared = Path("/dev/shm")  # noqa: S108 - the point is memory, and the folder below it is private
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * needed + (64 << 20)
        parent = shared if roomy else Path(tempfile.gettempdir())
        remove_abandoned(parent, cls.PREFIX)
        return cls(Path(tempfile.mkdtemp(prefix=f"{cls.PREFIX}{os.getpid()}-", dir=parent)))

    def put(self, name: str, tensors: Mapping[str, Tensor], meta: Any) -> Path:
        """Write a payload and return its file."""
        path = self.path / f"{name}.safetensors"
        write_tensors(path, tensors, meta, sync=False, checksum=False)
        return path

    def remove(self) -> None:
        """Delete the folder; what is mapped stays readable to who mapped it."""
        shutil.rmtree(self.path, ignore_errors=True)


class Channel:
    """One end of a connection; a frame is named tensors and a JSON value."""

    def __init__(self, connection: Connection, spool: Spool) -> None:
        self.connection, self.spool = connection, spool

    def send(self, kind: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Send one frame; tensors beyond 64 KiB go through the spool."""
        if bytes_of(tensors) > INLINE_BYTES:
            path = self.spool.put(uuid.uuid4().hex, tensors, meta)
            self.connection.send_bytes(dumps({}, {"kind": kind, "file": path.name}))
        else:
            self.connection.send_bytes(dumps(tensors, {"kind": kind, "meta": meta}))

    def receive(self) -> tuple[str, dict[str, Tensor], Any]:
        """Wait for one frame.

        :raises EOFError: the other end is gone.
        """
        try:
            tensors, header = loads(self.connection.recv_bytes())
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if "file" not in header:
            return header["kind"], tensors, header["meta"]
        path = self.spool.path / header["file"]
        tensors, meta = read_tensors(path)
        path.unlink()
        return header["kind"], tensors, meta


def socket_pair() -> tuple[Connection, socket.socket]:
    """Return this process's end of a new connection, and the end to hand to a child."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs


def pack_task(task: ClientTask) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Split a task into tensors and JSON."""
    return task.tensors, {k: v for k, v in asdict(_bare(task)).items() if k != "tensors"}


def unpack_task(tensors: dict[str, Tensor], meta: dict[str, Any]) -> ClientTask:
    """Join what :func:`pack_task` split."""
    return ClientTask(**meta, tensors=tensors)


def pack_outcome(outcome: Outcome) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Split an outcome into its kind, tensors and JSON."""
    if isinstance(outcome, ClientFailure):
        return "failure", {}, asdict(outcome)
    return "result", outcome.tensors, {"task_id": outcome.task_id, "meta": outcome.meta}


def unpack_outcome(kind: str, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Outcome:
    """Join what :func:`pack_outcome` split."""
    if kind == "failure":
        return ClientFailure(**meta)
    return ClientResult(meta["task_id"], tensors, meta["meta"])


def pack_error(error: FedcoreError) -> dict[str, Any]:
    """Return an error that ends the run as JSON."""
    where = {"plugin": getattr(error, "plugin", None), "hook": getattr(error, "hook", None)}
    return {"type": type(error).__name__, "message": str(error), **where}


def unpack_error(meta: Mapping[str, Any]) -> FedcoreError:
    """Return what :func:`pack_error` was given."""
    if meta["type"] in _STORAGE:
        return _STORAGE[meta["type"]](meta["message"])
    return PluginContractError(meta["message"], plugin=meta["plugin"], hook=meta["hook"])


def _bare(task: ClientTask) -> ClientTask:
    return ClientTask(**{**task.__dict__, "tensors": {}})


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders ``<prefix><process id>-...`` of processes that are gone."""
    for folder in parent.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
