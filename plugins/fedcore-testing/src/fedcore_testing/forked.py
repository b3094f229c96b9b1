"""Processes that start by a fork, for tests that start many: it takes milliseconds instead of seconds.

They are forked from a process that has imported torch, ``fork_server.py``. Linux only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fedcore import FedcoreError
from fedcore.engines import local

SERVER = Path(__file__).with_name("fork_server.py")


class ForkedProcess:
    """A process that the server forked, with the part of ``subprocess.Popen`` that engines and sweeps use.

    :ivar pid: its process id.
    :ivar returncode: its exit code, a signal's number times -1, or None while it runs.
    """

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status, "rb", buffering=0)
        self._reading = threading.Lock()
        self.returncode: int | None = None
        told = self._status.readline()
        if not told:
            raise FedcoreError("the process that forks others has ended; its output above says why")
        self.pid = int(told)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        :raises subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._reading:
                if self.returncode is None:  # another thread may also have waited
                    told = self._status.readline()
                    self.returncode = int(told or -signal.SIGKILL)  # without a word: the keeper was killed
                    self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Our end of the process that forks others; it starts with the first of them.

    :param modules: what it imports in addition to what a worker imports.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None

    def fork(
        self,
        call: str,
        arguments: Sequence[Any],
        *,
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
    ) -> ForkedProcess:
        """Start a process, in a session of its own, that calls a function; what this returns, or 0, is its exit code.

        :param call: ``module:function``.
        :param arguments: of the function, as JSON.
        :param environment: the process's; of the first one, also the server's.
        :param descriptors: its number of an open file -> ours; without others, it has our stdout and stderr.
        """
        if self._process is None or self._process.poll() is not None:
            self._start(environment)
        opened = {1: 1, 2: 2, **descriptors}
        request = {
            "call": call,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "numbers": list(opened),
        }
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [theirs, *opened.values()])
        finally:
            os.close(theirs)
        return ForkedProcess(status)

    def _start(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
                # By its file: as a module it would bring all of fedcore_testing, which no worker has.
                [sys.executable, "-P", SERVER, str(theirs.fileno()), *self._modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=environment,
            )

    def close(self) -> None:
        """End the server, and with it all its processes."""
        if self._process is not None:
            self._channel.close()
            self._process.wait()
            self._process = None


_servers: list[ForkServer] = []


@contextmanager
def forked_workers(*modules: str) -> Iterator[None]:
    """Let the local engine's workers, in the block, be forked from one process that has imported torch.

    A worker begins as a fresh process does, without the seconds of processor time that importing takes. The process
    starts with the first worker and ends with the outermost block. Linux only; elsewhere, this does nothing.

    :param modules: what that process also imports, because the forked processes need it.
    """
    if _servers or sys.platform != "linux":
        yield
        return
    server = ForkServer(modules)

    def fork(connection: socket.socket) -> ForkedProcess:
        fd = connection.fileno()
        return server.fork(
            "fedcore.engines.worker:main",
            [fd],
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
