"""The transport between the local engine and its workers: frames over a socket, large tensors in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from fedcore.base.tensors import bytes_of
from fedcore.storage.serial import dumps, loads, read_tensors, write_tensors

INLINE_BYTES = 1 << 16
WORKER_SPEC = "worker-spec"
"""Name of what a worker is set up with, in the spool."""


class Spool:
    """A folder in shared memory (/dev/shm where there is one with room) for tensors that processes exchange.

    Its name holds the process id of its owner, so that the spool of a killed process is found and deleted.
    """

    PREFIX = "fedcore-spool-"

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, needed: int) -> Spool:
        """Create a spool with room for ``needed`` bytes and delete abandoned ones."""
        shared = Path("/dev/shm")  # noqa: S108 - shared memory is the purpose, and the folder below it is private
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * needed + (64 << 20)
        parent = shared if roomy else Path(tempfile.gettempdir())
        remove_abandoned(parent, cls.PREFIX)
        return cls(Path(tempfile.mkdtemp(prefix=f"{cls.PREFIX}{os.getpid()}-", dir=parent)))

    def put(self, name: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Write named tensors and a JSON value."""
        write_tensors(self._file(name), tensors, meta, sync=False, checksum=False)

    def get(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Read what :meth:`put` wrote; large tensors are mapped."""
        return read_tensors(self._file(name))

    def delete(self, name: str) -> None:
        """Delete what :meth:`put` wrote; mapped tensors stay readable. Idempotent."""
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def remove(self) -> None:
        """Delete the folder; mapped tensors stay readable."""
        shutil.rmtree(self.path, ignore_errors=True)


class Channel:
    """One end of a connection; a frame is named tensors and a JSON value."""

    def __init__(self, connection: Connection, spool: Spool) -> None:
        self.connection, self.spool = connection, spool

    def send(self, kind: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Send one frame; tensors beyond 64 KiB go through the spool."""
        if bytes_of(tensors) > INLINE_BYTES:
            name = uuid.uuid4().hex
            self.spool.put(name, tensors, meta)
            self.connection.send_bytes(dumps({}, {"kind": kind, "spooled": name}))
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
        if "spooled" not in header:
            return header["kind"], tensors, header["meta"]
        tensors, meta = self.spool.get(header["spooled"])
        self.spool.delete(header["spooled"])
        return header["kind"], tensors, meta


def socket_pair() -> tuple[Connection, socket.socket]:
    """Return this process's end of a new connection, and the end to hand to a child."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs


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
