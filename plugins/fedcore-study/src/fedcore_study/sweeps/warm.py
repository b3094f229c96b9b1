"""Processes of runs without the cost of an import each: all are forked from one process that has imported torch.

``python -m fedcore_study.sweeps.warm FD`` is that process. It imports what a run needs, forks a process for each
request, and tells how each ended. Every run still has a process of its own: a crash takes no other run with it, and a
run finds the same state as in ``fedcore train``. Only on Linux is a fork after such imports safe. Elsewhere each run's
process starts anew.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from fedcore.base.process import ALLOCATOR, command, end_without_collecting, environment, importing, keep_freed_memory

CHILD = "fedcore_study.sweeps.child"
"""The module whose ``main`` a run's process calls."""

_MOST = 1 << 17
"""Bytes of a request: a run's configuration, or names of modules."""

ENVIRONMENT = {
    **ALLOCATOR,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment of the processes."""


class WarmProcess:
    """A process that was forked for us, with the part of ``subprocess.Popen`` that :func:`run_jobs` uses."""

    def __init__(self, status: int, stdin: int, stdout: int) -> None:
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb")
        self.returncode: int | None = None
        self._status, self._waiting = os.fdopen(status, "rb", buffering=0), threading.Lock()
        self.pid = int(self._status.readline() or 0)

    def wait(self) -> int:
        """Wait for the process and return its exit code; that of a signal is negative."""
        with self._waiting:
            if self.returncode is None:
                told = self._status.readline()
                self.returncode = int(told or -signal.SIGKILL)  # empty: the process that forks was killed
                self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Starter:
    """Starts the processes of runs. :func:`starting` makes one."""

    def __init__(self) -> None:
        self._environment = environment(**ENVIRONMENT)
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        if sys.platform == "linux":
            self._start()

    def __call__(self, arguments: Sequence[str], log: int, keep: Sequence[int] = ()) -> Any:
        """Start a run's process.

        :param arguments: of ``CHILD``'s ``main``.
        :param log: the file for what the process prints on stderr.
        :param keep: further files that the process has open until it ends.
        """
        if self._server is None:
            return subprocess.Popen(  # noqa: S603 - our own module, arguments of our own making
                command(CHILD, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=keep,
                start_new_session=True,  # Ctrl-C in the terminal is the sweep's business
                env=self._environment,
            )
        if self._server.poll() is not None:  # killed, for want of memory perhaps
            self._start()
        stdin, ours = os.pipe()
        theirs, stdout = os.pipe()
        status, ended = os.pipe()
        try:
            self._ask({"arguments": list(arguments)}, [ended, stdin, stdout, log, *keep])
        finally:
            for descriptor in (ended, stdin, stdout):
                os.close(descriptor)
        return WarmProcess(status, ours, theirs)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules that many of the runs will import, once for all of them."""
        if self._server is not None and modules:
            self._ask({"modules": list(modules)}, [])

    def close(self) -> None:
        """End the process that forks the others. A run that is still at work stops with a checkpoint."""
        if self._server is not None and self._channel is not None:
            self._channel.close()
            self._server.kill()
            self._server.wait()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
                command("fedcore_study.sweeps.warm", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
            )

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        assert self._channel is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen in the status, which nobody writes
            socket.send_fds(self._channel, [json.dumps(request).encode()], list(descriptors))


@contextlib.contextmanager
def starting() -> Iterator[Starter]:
    """Yield what starts runs' processes. The process that forks them begins to import while the caller goes on."""
    starter = Starter()
    try:
        yield starter
    finally:
        starter.close()


_ended: dict[int, int] = {}
"""In the process that forks: where the end of each process is told, by process id."""


def serve(channel: socket.socket) -> None:
    """Fork for each request until the other end closes."""
    with importing():
        importlib.import_module("fedcore.runs.experiment")
        importlib.import_module(CHILD)
    signal.signal(signal.SIGCHLD, _tell_ends)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MOST, 16)
        if not message:
            return
        request = json.loads(message)
        for module in request.get("modules", ()):
            with contextlib.suppress(Exception):  # the run that needs it will say what is wrong
                importlib.import_module(module)
        if "arguments" not in request:
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # a process may end before it is noted here
        pid = os.fork()
        if pid == 0:
            channel.close()
            _be_child(request["arguments"], *descriptors)
        ended, *others = descriptors
        for descriptor in others:
            os.close(descriptor)
        _ended[pid] = ended
        with contextlib.suppress(BrokenPipeError):
            os.write(ended, b"%d\n" % pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _tell_ends(number: int, frame: FrameType | None) -> None:
    """Write the exit codes of processes that ended."""
    while _ended:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(_ended[pid], b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(_ended.pop(pid))


def _be_child(arguments: list[str], ended: int, stdin: int, stdout: int, log: int, *keep: int) -> None:
    """Be the process that was asked for: ends this process."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for descriptor, number in ((stdin, 0), (stdout, 1), (log, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for descriptor in (ended, *_ended.values()):
            os.close(descriptor)
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        code = importlib.import_module(CHILD).main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    end_without_collecting()
    keep_freed_memory()
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        serve(opened)
