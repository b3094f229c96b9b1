"""Worker processes forked from one that has imported torch: a start takes milliseconds in place of seconds.

For tests, which start many (:func:`fedcore.testing.forked_workers`). The server is ``python -m
fedcore.engines.fork_server FD``. It imports what a worker imports and nothing else, and then forks: a worker begins as
a fresh process would, with the environment, folder and import path of its engine. Between the server and each worker
stands a keeper, which waits for the worker and reports how it ended. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcore.base.errors import FedcoreError
from fedcore.base.startup import end_without_collecting, importing
from fedcore.base.subprocesses import command
from fedcore.engines import worker

_MOST = 1 << 17  # bytes of a request: environment and import path


class ForkedProcess:
    """A worker process that the server forked, with the part of ``subprocess.Popen`` that the engine uses.

    :ivar pid: its process id.
    :ivar returncode: its exit code, a signal's number times -1, or None while it runs.
    """

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status, "rb", buffering=0)
        self.returncode: int | None = None
        told = self._status.readline()
        if not told:
            raise FedcoreError("the process that forks workers has ended; its output above says why")
        self.pid = int(told)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        :raises subprocess.TimeoutExpired: it runs still after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            self.returncode = int(self._status.readline() or -signal.SIGKILL)  # without a word: the keeper was killed
            self._status.close()
        return self.returncode

    def kill(self) -> None:
        """Kill the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Our end of the process that forks workers; it starts with the first worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, connection: socket.socket, spool: Path, environment: Mapping[str, str]) -> ForkedProcess:
        """Start a worker as ``python -m fedcore.engines.worker`` would.

        :param connection: the worker's end of its channel.
        :param environment: the worker's; of the first one, also the server's.
        """
        if self._process is None or self._process.poll() is not None:
            self._start(environment)
        status, theirs = os.pipe()
        request = {"spool": str(spool), "environment": dict(environment), "folder": os.getcwd()}
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [connection.fileno(), theirs, 1, 2])
        finally:
            os.close(theirs)
        return ForkedProcess(status)

    def _start(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
                command("fedcore.engines.fork_server", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=environment,
            )

    def close(self) -> None:
        """End the server, and with it all its workers."""
        if self._process is not None:
            self._channel.close()
            self._process.wait()
            self._process = None


def main(fd: int) -> None:
    """Import what a worker needs, then fork one for each request, until the other end closes the connection."""
    with importing():  # a collection in a worker would copy all pages
        import fedcore.engines.serving  # noqa: F401 - for the workers

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    with socket.socket(fileno=fd) as channel:
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, _MOST, 4)
            if not message:
                return
            if os.fork() == 0:
                channel.close()
                _keep(json.loads(message), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _keep(request: dict[str, Any], connection: int, status: int, *outputs: int) -> None:
    """Fork a worker, tell its process id, wait for it, and tell its exit code; ends this process."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _work(request, connection, *outputs)
    for descriptor in (connection, *outputs):  # the engine learns of a worker's end by its connection
        os.close(descriptor)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _work(request: dict[str, Any], connection: int, *outputs: int) -> None:
    """Be a worker process; ends this process."""
    code = 0
    try:
        os.setpgid(0, 0)
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        own = [place for place in sys.path if place not in (os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *own]
        worker.main(connection, Path(request["spool"]), os.getppid())
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(worker.PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_without_collecting()
    main(int(sys.argv[1]))
