"""Processes forked from one that has imported torch: a start takes milliseconds in place of seconds.

For tests, which start many (:func:`fedcore.testing.forked_workers`). The server is ``python -m
fedcore.engines.fork_server FD [MODULE ...]``. It imports what a worker imports and these modules, and then forks: a
process begins as a fresh one would, with the environment, folder and import path of the one that asked for it, and
calls a function. Between the server and each process stands a keeper, which waits for it and reports how it ended.
Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from fedcore.base.errors import FedcoreError
from fedcore.base.startup import end_without_collecting, importing
from fedcore.base.subprocesses import command
from fedcore.engines.worker import PR_SET_PDEATHSIG

_MOST = 1 << 17  # bytes of a request: environment and import path
_DESCRIPTORS = 16


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

        :raises subprocess.TimeoutExpired: it runs still after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._reading:
                if self.returncode is None:  # another thread may have waited, too
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

    :param modules: what it imports beside what a worker imports.
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
        session: bool = False,
    ) -> ForkedProcess:
        """Start a process that calls a function; what this returns, or 0, is its exit code.

        :param call: ``module:function``.
        :param arguments: of the function, as JSON.
        :param environment: the process's; of the first one, also the server's.
        :param descriptors: its number of an open file -> ours; without others, it has our stdout and stderr.
        :param session: the process begins a session, in place of a group of processes.
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
            "session": session,
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
                command("fedcore.engines.fork_server", str(theirs.fileno()), *self._modules),
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


def main(fd: int, modules: Sequence[str]) -> None:
    """Import what a worker needs, and these modules; then fork for each request, until the other end closes."""
    with importing():  # a collection in a worker would copy all pages
        import fedcore.engines.serving  # noqa: F401 - for the workers

        for module in modules:
            _module(module)

    signal.signal(signal.SIGCHLD, _collect)
    with socket.socket(fileno=fd) as channel:
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, _MOST, _DESCRIPTORS)
            if not message:
                return
            if os.fork() == 0:
                channel.close()
                _keep(json.loads(message), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _collect(number: int, frame: FrameType | None) -> None:
    """Collect the keepers that ended: their processor time counts as the server's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(request: dict[str, Any], status: int, *descriptors: int) -> None:
    """Fork a process, tell its id, wait for it, and tell its exit code; ends this process."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _work(request, descriptors)
    for descriptor in descriptors:  # an engine learns of a worker's end by its connection
        os.close(descriptor)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _work(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be the process that was asked for; ends it."""
    code = 0
    try:
        if request["session"]:
            os.setsid()
        else:
            os.setpgid(0, 0)
        _place(descriptors, request["numbers"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        own = [place for place in sys.path if place not in (os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *own]
        module, _, function = request["call"].partition(":")
        code = getattr(_module(module), function)(*request["arguments"]) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _module(name: str) -> ModuleType:
    """Import a module that the process of the tests, our parent, names."""
    return importlib.import_module(name)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files the numbers that the process knows them by; one may have another's."""
    beyond = max(*descriptors, *numbers) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_without_collecting()
    main(int(sys.argv[1]), sys.argv[2:])
