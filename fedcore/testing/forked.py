"""Processes that start by a fork, for tests that start many."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from fedcore.engines import local
from fedcore.engines.fork_server import ForkedProcess, ForkServer

_servers: list[ForkServer] = []


@contextmanager
def forked_workers(*modules: str) -> Iterator[None]:
    """Let the local engine's workers, in the block, be forked from one process that has imported torch.

    A worker begins as a fresh process does, without the seconds of processor time that importing takes. The process
    starts with the first worker and ends with the outermost block. Linux only; elsewhere, this does nothing.

    :param modules: what that process imports, too, for tests whose forked processes all import it.
    """
    if _servers or sys.platform != "linux":
        yield
        return
    server = ForkServer(modules)

    def fork(connection: socket.socket, spool: Path) -> ForkedProcess:
        fd = connection.fileno()
        return server.fork(
            "fedcore.engines.worker:begin",
            [fd, str(spool)],
            environment=local.worker_environment(),
            descriptors={fd: fd},
        )

    _servers.append(server)
    try:
        with mock.patch.object(local, "start_worker", fork):
            yield
    finally:
        _servers.remove(server)
        server.close()


def fork_server() -> ForkServer | None:
    """Return the server of the block of :func:`forked_workers` that this is called in; None outside of one."""
    return _servers[-1] if _servers else None
