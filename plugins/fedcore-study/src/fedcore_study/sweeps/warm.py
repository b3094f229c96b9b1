"""Processes of runs without the cost of an import each: all are forked from one process that has imported torch.

``python -m fedcore_study.sweeps.warm FD`` is that process. It imports what a run needs. For each request it forks a
keeper, which forks the run's process and tells its end. Every run still has a process of its own: a crash takes no
other run with it, and a run finds the same state as in ``fedcore train``. Only on Linux is a fork after such imports
safe. Elsewhere each run's process starts anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fedcore.tools import environment, importing, process, python_command

CHILD = "fedcore_study.sweeps.child"
"""The module whose ``main`` a run's process calls."""

_MOST = 1 << 17
"""Bytes of a request: a run's configuration."""

ENVIRONMENT = {
    **process.ALLOCATOR,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment of the processes."""


class WarmProcess:
    """A process that was forked for us, with the part of ``subprocess.Popen`` that :func:`run_jobs` uses."""

    def __init__(self, status: int, stdin: int, stdout: int) -> None:
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline() or 0)  # 0: the process that forks ended while it imported

    def wait(self) -> int:
        """Wait for the process and return its exit code; that of a signal is negative."""
        if self.returncode is None:
            with self._status:
                self.returncode = int(self._status.readline() or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.pid and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Starter:
    """Starts the processes of runs. :func:`starting` makes one."""

    def __init__(self) -> None:
        self._environment = environment(**ENVIRONMENT)
        self._server: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux":
            self._start()

    def __call__(self, arguments: Sequence[str], log: int) -> Any:
        """Start a run's process.

        :param arguments: of ``CHILD``'s ``main``.
        :param log: the file for what the process prints on stderr.
        """
        if self._server is None:
            return subprocess.Popen(  # noqa: S603 - our own module, arguments of our own making
                python_command(CHILD, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is the sweep's business
                env=self._environment,
            )
        if self._server.poll() is not None:  # it was killed, perhaps for want of memory
            self._channel.close()
            self._start()
        stdin, ours = os.pipe()
        theirs, stdout = os.pipe()
        status, ended = os.pipe()
        with contextlib.suppress(BrokenPipeError):  # it was killed just now: the run counts as failed
            socket.send_fds(self._channel, [json.dumps(list(arguments)).encode()], [ended, stdin, stdout, log])
        for descriptor in (ended, stdin, stdout):
            os.close(descriptor)
        return WarmProcess(status, ours, theirs)

    def close(self) -> None:
        """End the process that forks the others. A run that is still at work stops with a checkpoint."""
        if self._server is not None:
            self._channel.close()
            self._server.kill()
            self._server.wait()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
                python_command("fedcore_study.sweeps.warm", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
            )


def starting() -> contextlib.closing[Starter]:
    """Return a block with what starts runs' processes. The process that forks them begins to import at once."""
    return contextlib.closing(Starter())


def serve(channel: socket.socket) -> None:
    """Fork a keeper for each request until the other end closes."""
    with importing():
        importlib.import_module("fedcore.runs.api")
        importlib.import_module(CHILD)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that ended leave no zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MOST, 4)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            _keep(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(arguments: list[str], status: int, stdin: int, stdout: int, log: int) -> NoReturn:
    """Fork a run's process, write its process id and its exit code to ``status``, and end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.setsid()
        for number, descriptor in enumerate((stdin, stdout, log)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.exit(importlib.import_module(CHILD).main(arguments))
    for descriptor in (stdin, stdout, log):
        os.close(descriptor)
    try:
        os.write(status, b"%d\n" % pid)
        _, ended = os.waitpid(pid, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    finally:
        os._exit(0)  # nobody needs an answer if the sweep's process is gone


if __name__ == "__main__":
    process.end_without_collecting()
    process.keep_freed_memory()
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        serve(opened)
