"""The process from which the processes of tests are forked: ``python fork_server.py FD [MODULE ...]``.

It imports what a worker imports and these modules, and then forks for each request of a
:class:`fedcore_testing.forked.ForkServer`: a process begins as a fresh one would, with the environment, folder and
import path of the one that asked for it, and calls a function. Between the server and each process stands a keeper,
which waits for it and reports how it ended. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from fedcore.engines.worker import PR_SET_PDEATHSIG
from fedcore.tools import importing

_MOST = 1 << 17  # bytes of a request: environment and import path
_DESCRIPTORS = 16


def main(fd: int, modules: Sequence[str]) -> None:
    """Import what a worker needs, and these modules; then fork for each request, until the other end closes."""
    with importing():  # a collection in a worker would copy all pages
        import fedcore.engines.worker  # noqa: F401 - for the workers

        for module in modules:
            importlib.import_module(module)

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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it dies with the server
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
        os.setsid()
        _place(descriptors, request["numbers"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        sys.path[:] = [*given, *(place for place in sys.path if place not in given)]
        module, _, function = request["call"].partition(":")
        code = getattr(importlib.import_module(module), function)(*request["arguments"]) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files the numbers that the process knows them by; one may have another's."""
    beyond = max(*descriptors, *numbers) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    atexit.register(gc.freeze)  # the process ends without a last collection
    main(int(sys.argv[1]), sys.argv[2:])
