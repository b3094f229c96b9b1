"""Processes without the cost of an import each: they are forked from a template, a process that has imported torch.

The template of ``fedcore train`` or ``resume`` is a fork of the command's process, so that all processes share the
memory of what they imported, some 130 MiB. Anywhere else it is a process of its own: a program may have threads, or use
CUDA.

A forked process begins as a fresh one would: with the environment, the folder and the import path of the process that
asked for it, in a session of its own. On macOS and Windows a fork after such imports is not safe; there is no template,
and processes start as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO

from fedcore import FedcoreError
from fedcore.tools import process, registry

if TYPE_CHECKING:
    from fedcore import RunConfig  # takes half a second, which a process that only dies with its parent need not spend

PR_SET_PDEATHSIG = 1

MOST_STARTS = 4
"""Number of templates in a row that may be killed before they are asked for a process."""

_LONGEST = 1 << 17  # bytes of a request: environment, import path, a run's configuration
_DESCRIPTORS = 16  # of a request
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class ForkedProcess:
    """A process that a template forked, with the part of ``subprocess.Popen`` that engines and sweeps use.

    :param status: where the template writes the process id, and later the exit code.
    :ivar returncode: its exit code, a signal's number times -1, or None while it runs.
    :ivar stdin: our end of its stdin, if whoever started it made a pipe; ``stdout`` likewise.
    """

    stdin: BinaryIO
    stdout: BinaryIO

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status, "rb", buffering=0)
        self._reading = threading.Lock()
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """The process id, once the template has forked it; 0 if the template ended before that."""
        while self._pid is None and self.returncode is None:
            self._read(None)
        return self._pid or 0

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        while self.returncode is None and self._read(0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        :raises subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        while self.returncode is None:
            if not self._read(timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def _read(self, timeout: float | None) -> bool:
        """Read the next number that the template writes; return whether there was one in so many seconds."""
        try:
            heard = bool(select.select([self._status], [], [], timeout)[0])
        except ValueError:  # another thread read the exit code, and closed the file
            return True
        with self._reading:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:  # as above
                line = self._status.readline()
                if line and self._pid is None:
                    self._pid = int(line)
                else:  # without an exit code the template was killed, and its processes with it
                    self.returncode = int(line or -signal.SIGKILL)
                    self._status.close()
        return heard

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it runs. One that the template has not forked yet will find its connection closed."""
        self.poll()  # reads the process id, if the template has written it
        if self._pid is not None:
            self.send_signal(signal.SIGKILL)


class Template:
    """Our end of a template. It starts at once, and imports while this process goes on.

    :param modules: what it imports in addition to what a worker imports.
    :param outlived: whether its processes may end their work when this process dies. By default they die with it.
    :param from_here: fork it from this process. One that takes its place is never forked from here.
    """

    def __init__(self, *modules: str, outlived: bool = False, from_here: bool = False) -> None:
        self._outlived = outlived
        self._arguments = ["0" if outlived else f"{os.getpid()}", *modules]
        self._process: subprocess.Popen[bytes] | _Child
        self._start(from_here)

    def fork(
        self, call: str, arguments: Sequence[Any], *, environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> ForkedProcess:
        """Start a process that calls a function. What this returns, or 0, is its exit code.

        :param call: ``module:function``.
        :param arguments: of the function, as JSON.
        :param descriptors: its number of an open file -> ours; without others, it has our stdout and stderr.
        :raises FedcoreError: the template was killed again and again.
        """
        ours = {1: sys.stdout, 2: sys.stderr}  # None: it is closed, and the number may be another file's
        opened = {number: number for number, stream in ours.items() if stream is not None} | dict(descriptors)
        request = json.dumps([call, list(arguments), dict(environment), os.getcwd(), list(opened)]).encode()
        status, theirs = os.pipe()
        try:
            for _ in range(MOST_STARTS):
                try:
                    socket.send_fds(self._channel, [request], [theirs, *opened.values()])
                    break
                except ConnectionError:  # it was killed, perhaps for want of memory
                    self.close()
                    self._start(from_here=False)
            else:
                raise FedcoreError(
                    f"the template of the worker processes was killed {MOST_STARTS} times in a row, perhaps for want "
                    "of memory. --workers 0 runs everything in one process."
                )
        finally:
            os.close(theirs)
        return ForkedProcess(status)

    def close(self) -> None:
        """End the template, and its processes with it; those that may end their work are waited for."""
        self._channel.close()
        if not self._outlived:
            self._process.kill()  # it may be stopped
        self._process.wait()

    def _start(self, from_here: bool) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if from_here:
                self._process = _Child(theirs.fileno(), *self._arguments)
                return
            self._process = subprocess.Popen(  # noqa: S603 - our own module, arguments of our own making
                process.python_command("fedcore_workers.forks", f"{theirs.fileno()}", *self._arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=None if sys.stdout else subprocess.DEVNULL,
                stderr=None if sys.stderr else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is the caller's business
                env=process.environment(**TEMPLATE),
            )


class _Child:
    """A template that this process forked from itself, as a ``subprocess.Popen`` for :class:`Template`.

    :param arguments: of :func:`main`.
    """

    def __init__(self, fd: int, parent: str, *modules: str) -> None:
        self._ended = False
        for stream in (sys.stdout, sys.stderr):  # what they hold would be written twice
            stream.flush()
        self._pid = os.fork()
        if self._pid == 0:
            with _ending(), open(os.devnull) as nothing:
                os.setsid()  # as in a fresh one, Ctrl-C in the terminal is the caller's business
                os.dup2(nothing.fileno(), 0)
                _set_allocator()
                main(os.dup(fd), int(parent), *modules)

    def kill(self) -> None:
        if not self._ended:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._ended:
            os.waitpid(self._pid, 0)
            self._ended = True


_OPTIONS = {"TRIM_THRESHOLD": (-1, 1 << 30), "TOP_PAD": (-2, 64 << 20), "MMAP_THRESHOLD": (-3, 1 << 30)}
"""Options of glibc's allocator: number in malloc.h, and value."""
_ROOM = 512 << 20  # bytes of address space for the heap of a worker, nearly always enough
_HUGE_PAGES = 14  # MADV_HUGEPAGE

TEMPLATE = {
    "GLIBC_TUNABLES": ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"])),
    **{f"MALLOC_{name}_": str(value) for name, (_, value) in _OPTIONS.items()},
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
"""What allocator and libraries read as a template or a worker starts, next to this process's own environment.

glibc keeps the freed activations of a worker, which every step would page-fault in again."""

_current: list[Template] = []


def current() -> Template | None:
    """Return the template of this process, if it has one."""
    return _current[-1] if _current else None


def _set_allocator() -> None:
    """Give this process the allocator's settings of :data:`TEMPLATE`, which glibc reads only as a process starts.

    Huge pages have no function. Hence the heap grows at once, and the kernel is asked for them there; memory that
    nothing writes to takes none. Without them, a step of a convolutional network took 3 % longer.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return  # not glibc
    for number, value in _OPTIONS.values():
        libc.mallopt(number, value)
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    begin = libc.sbrk(0)
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(_ROOM))))
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(libc.sbrk(0) - begin), _HUGE_PAGES)


@contextmanager
def template(*modules: str, outlived: bool = False, from_here: bool = False) -> Iterator[Template | None]:
    """Give this process a template in the block. Blocks within each other share the outermost one's. None: no Linux.

    See :class:`Template` for the arguments.
    """
    if _current or sys.platform != "linux":
        yield current()
        return
    started = Template(*modules, outlived=outlived, from_here=from_here)
    _current.append(started)
    try:
        yield started
    finally:
        _current.remove(started)
        started.close()


os.register_at_fork(after_in_child=_current.clear)  # it belongs to the process that started it


def early_template(config: RunConfig) -> AbstractContextManager[Template | None]:
    """Return a block with a template if the run is likely to have workers. If possible, it is a fork of this process.

    Call it when torch is imported, before this process computes, starts threads or touches CUDA.
    """
    on_cuda = config.device.startswith("cuda") or (config.device == "auto" and os.path.exists("/dev/nvidiactl"))
    has_workers = config.engine == "local" and (not on_cuda if config.workers is None else config.workers > 0)
    if not has_workers:
        return nullcontext()
    torch = sys.modules.get("torch")
    is_new = torch is not None and threading.active_count() == 1 and not (on_cuda or torch.cuda.is_initialized())
    if is_new:
        _import_ahead(plugin=config.plugins, model=[config.model])
    return template(from_here=is_new)


def _import_ahead(**named: Iterable[str]) -> None:
    """Import what this process and each worker would import a little later: once for all of them.

    So are installed packages read, of which each has a file or two: by fedcore for their names, and by pydantic, which
    looks for plugins of its own, as the first options are checked.

    :param named: kind -> the names that are imported, beside FedAvg and the runners.
    """
    from fedcore.hooks import create_plugin  # imports torch

    importlib.import_module("threadpoolctl")
    named["runner"] = registry.available("runner")
    with contextlib.suppress(FedcoreError):  # as below
        create_plugin("fedavg", {})
    for kind, names in named.items():
        points = registry.available(kind)
        for name in names:
            if name in points:  # no code of a user: it could start threads
                with contextlib.suppress(FedcoreError):  # the run says what is wrong
                    registry.resolve(kind, name)


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Let Linux end this process at once when its parent dies, even in the middle of a computation or while stopped.

    :param parent: the parent's process id. If it has died before, this process ends here.
    :param by: the signal. One that can be handled lets the process end its own work first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, parent: int, *modules: str) -> None:
    """Be a template: import what a worker imports, and these modules. Then fork for each request.

    :param fd: the connection with requests. The template ends when the other end closes.
    :param parent: the process that it dies with; 0 for none.
    """
    if parent:
        die_with_parent(parent)
    for number in _STOPPING:  # SLURM sends them to every process of a job
        signal.signal(number, signal.SIG_IGN)
    with process.importing():
        for module in ("fedcore_workers.worker", *modules):
            importlib.import_module(module)
        _import_ahead()
    with process.one_thread():  # looks for the libraries that have threads
        pass
    gc.freeze()  # a collection in a forked process would copy all pages
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, int] = {}  # process id -> where its exit code is written
    is_open = True
    with socket.socket(fileno=fd) as channel:
        while is_open or (running and not parent):
            heard, _, _ = select.select([fd, ended] if is_open else [ended], [], [])
            if ended in heard:
                os.read(ended, 1 << 12)
                _write_ends(running)
            if fd in heard:
                request, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, _DESCRIPTORS)
                if not request:
                    is_open = False
                    continue
                status, *opened = descriptors
                pid = os.fork()
                if pid == 0:
                    for descriptor in (fd, ended, wakeup, status, *running.values()):
                        os.close(descriptor)
                    _work(opened, *json.loads(request))
                running[pid] = status
                _write(status, pid)
                for theirs in opened:  # an engine learns of a worker's end by its connection
                    os.close(theirs)


def _write_ends(running: dict[int, int]) -> None:
    """Write the exit codes of the processes that ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = running.pop(ended[0])
            _write(status, os.waitstatus_to_exitcode(ended[1]))
            os.close(status)


def _write(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody needs it if the process that asked is gone
        os.write(status, b"%d\n" % number)


def _work(
    descriptors: Sequence[int],
    call: str,
    arguments: Sequence[Any],
    variables: Mapping[str, str],
    folder: str,
    numbers: Sequence[int],
) -> None:
    """Be the process that was asked for; ends it."""
    with _ending():
        template = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(template)
        os.setsid()
        _place(descriptors, numbers)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        paths = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = dict.fromkeys([*paths, *sys.path])  # each once, as in a fresh one
        module, _, function = call.partition(":")
        sys.exit(getattr(importlib.import_module(module), function)(*arguments))


@contextmanager
def _ending() -> Iterator[None]:
    """End this process after the block, without what the process that it was forked from would do at its end."""
    code: object = 0
    try:
        yield
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


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
    process.end_without_collecting()
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
