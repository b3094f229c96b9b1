"""The default engine: worker processes on this machine, or this process itself.

On the CPU, clients run in persistent worker processes of one thread each. Data and weights go through shared memory. A
single worker is also a process, so that bits do not depend on the number of workers. On CUDA, or with ``workers = 0``,
clients run in this process.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from fedcore.base.errors import ConfigError, FedcoreError
from fedcore.base.process import CORES, command, cores, environment
from fedcore.base.tensors import unflatten
from fedcore.client.captured_steps import captures
from fedcore.client.messages import (
    ClientFailure,
    ClientSite,
    ClientTask,
    Pair,
    SharedPayload,
    pack_shared,
    pack_site,
    pack_task,
    unpack_outcome,
)
from fedcore.engines.bundles import Bundle, bundled
from fedcore.engines.dispatch import Dispatcher
from fedcore.engines.in_process import InProcessEngine, LanesEngine
from fedcore.engines.transport import Channel, put_frame
from fedcore.models.placement import resolve_device

KILLED_EARLY = 3
"""Maximum number of workers that are replaced if they are killed before they are ready. One more ends the run."""

STARTS_WITHIN = 120.0
"""Lower bound, in seconds, of the time limit until a worker is ready. The worker first has to import torch."""

STOPS_WITHIN = 3.0
"""Seconds that idle workers have to stop before they are killed."""

LONGEST_POLL = 2**31 - 1
"""The longest wait of poll, in milliseconds: 24 days. A longer wait takes several polls."""

# By default glibc returns freed activations to the kernel, and every step page-faults them in again.
ALLOCATOR = {
    "GLIBC_TUNABLES": ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"])),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def LocalEngine(site: ClientSite) -> InProcessEngine | WorkerEngine:  # noqa: N802 - named by an entry point as a class
    """Return the engine for the run's device and number of workers and lanes."""
    config, device = site.config, resolve_device(site.config.device)
    workers, lanes = config.workers, min(config.lanes, config.clients)
    if workers == 0 or (device.type == "cuda" and workers is None):
        if config.client_timeout is not None:
            raise ConfigError("--client-timeout needs worker processes, which can be killed: --workers 1 or more")
        if lanes > 1 and captures(config, device, site.dataset):
            return LanesEngine(site, lanes)
        return InProcessEngine(site)
    return WorkerEngine(site, min(workers or cores(), config.clients))  # further workers would never have a task


class Process(Protocol):
    """The part of a worker process that the engine uses. ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """The process id."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        :param timeout: in seconds; None waits without a limit.
        :raises subprocess.TimeoutExpired: the process is still running.
        """

    def kill(self) -> None:
        """Kill the process if it is running."""


def start_worker(connection: socket.socket) -> Process:
    """Start a worker process with its end of a channel. Tests replace this function by a fork."""
    return subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
        command("fedcore.engines.worker", str(connection.fileno()), str(os.getpid())),
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the engine's own business
        env=worker_environment(),
    )


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker process."""
    return environment(**ALLOCATOR, **{CORES: "1"}, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


class _Worker:
    """One worker process and this end of its channel.

    :param site: the descriptor of the packed site.
    :param shared: key -> descriptor of each shared payload.
    :param timeout: the limit for a client's answer, in seconds; None for no limit.
    """

    def __init__(self, site: int, shared: dict[str, int], timeout: float | None) -> None:
        self.since = time.monotonic()  # start of the process, later of its task
        connection, theirs = socket.socketpair()
        with theirs:
            self.process = start_worker(theirs)
        connection.settimeout(timeout)  # it may stop in the middle of a message
        self.channel = Channel(connection)
        self.task: ClientTask | None = None
        self.ready = False
        self._shared, self._has = shared, ""  # the payload that the process has
        with contextlib.suppress(OSError):  # a dead worker is detected by _collect
            self.channel.send({}, None, descriptor=site)

    def start(self, task: ClientTask) -> None:
        self.task, self.since = task, time.monotonic()
        tasks = task.tasks if isinstance(task, Bundle) else [task]
        packed = [pack_task(each) for each in tasks]
        lent = None if task.shared in (None, self._has) else self._shared[task.shared]
        self._has = task.shared or self._has
        with contextlib.suppress(OSError):  # a dead worker is detected by _collect
            self.channel.send(packed[0][0], [meta for _, meta in packed], descriptor=lent)

    def stop(self) -> None:
        self.channel.connection.close()


class WorkerEngine:
    """Runs tasks on worker processes; a worker that dies is replaced and its task becomes a failure."""

    def __init__(self, site: ClientSite, workers: int) -> None:
        self.workers = workers
        self._killed_early = 0
        self._seconds: dict[str, float] = {}  # of the workers' processors for a task, by kind
        self._timeout = site.config.client_timeout
        self._dispatcher: Dispatcher[_Worker] = Dispatcher([])
        self._shared: dict[str, int] = {}
        self._site = put_frame(pack_site(site), None)
        try:
            for _ in range(workers):
                self._dispatcher.workers.append(self._new_worker())
        except BaseException:
            self.close()
            raise

    def _new_worker(self) -> _Worker:
        return _Worker(self._site, self._shared, self._timeout)

    def share(self, key: str, payload: SharedPayload) -> None:
        """Put a payload into memory that all workers map."""
        self._shared[key] = put_frame(*pack_shared(payload))

    def unshare(self, key: str) -> None:
        """Drop a payload. Workers that have it keep it until they get the next one."""
        if key in self._shared:
            os.close(self._shared.pop(key))

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks side by side and yield each as it finishes. A paused client's task waits for its worker.

        If a worker dies during a bundle, each task of the bundle runs again alone. Then only the task that ends its
        worker fails.
        """
        tasks = list(tasks)
        if window is None and self._timeout is None:  # both limits concern single tasks
            tasks = list(bundled(tasks, self.workers, self._seconds))
        again: list[ClientTask] = []
        for task, outcome in self._dispatcher.run(tasks, self._collect, window=window):
            if not isinstance(task, Bundle):
                yield task, outcome
            elif isinstance(outcome, ClientFailure):
                again += task.tasks
            else:
                yield from zip(task.tasks, outcome, strict=True)
        yield from self._dispatcher.run(again, self._collect, window=None)

    def close(self) -> None:
        """Stop the workers and free the memory."""
        for worker in self._dispatcher.workers:
            worker.stop()
            if worker.task is not None:
                worker.process.kill()
        give_up = time.monotonic() + STOPS_WITHIN
        for worker in self._dispatcher.workers:
            try:
                worker.process.wait(timeout=max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._dispatcher.workers.clear()
        for key in list(self._shared):
            self.unshare(key)
        if self._site >= 0:
            os.close(self._site)
            self._site = -1

    def _collect(self) -> None:
        """Wait for messages of workers, or for a time limit, and report them to the dispatcher."""
        connections = {worker.channel.connection.fileno(): worker for worker in self._dispatcher.workers}
        poll, patience = select.poll(), self._patience()
        for connection in connections:
            poll.register(connection, select.POLLIN)
        heard = poll.poll(None if patience is None else min(math.ceil(1000 * patience), LONGEST_POLL))
        for worker in self._overdue() if not heard else ():
            self._give_up(worker)
        for connection, _ in heard:
            self._hear(connections[connection])

    def _hear(self, worker: _Worker) -> None:
        try:
            tensors, (kind, *said), _ = worker.channel.receive()
        except EOFError:
            self._replace(worker)
        except TimeoutError:
            self._give_up(worker)
        else:
            if kind != "outcomes":
                self._dispatcher.take(worker, kind, tensors, *said)
                return
            (metas, seconds), groups = said, unflatten(tensors)
            outcomes = [unpack_outcome(groups.get(f"{number}", {}), meta) for number, meta in enumerate(metas)]
            task = worker.task
            if task is not None:
                each = seconds / len(outcomes)
                self._seconds[task.kind] = 0.9 * self._seconds.get(task.kind, each) + 0.1 * each
            self._dispatcher.finish(worker, outcomes if isinstance(task, Bundle) else outcomes[0])

    def _patience(self) -> float | None:
        """Return the seconds until the next worker is overdue; None if no worker has a time limit."""
        left = [self._limit(worker) - time.monotonic() for worker in self._at_work()]
        return max(0.0, min(left)) if left else None

    def _overdue(self) -> list[_Worker]:
        return [worker for worker in self._at_work() if time.monotonic() >= self._limit(worker)]

    def _at_work(self) -> list[_Worker]:
        """Return the workers that have to answer within the time limit; empty without a limit."""
        waited_for = [w for w in self._dispatcher.workers if w.task is not None or not w.ready]
        return [] if self._timeout is None else waited_for

    def _limit(self, worker: _Worker) -> float:
        """Return the monotonic time at which a worker is overdue."""
        assert self._timeout is not None
        return worker.since + (self._timeout if worker.ready else max(self._timeout, STARTS_WITHIN))

    def _give_up(self, worker: _Worker) -> None:
        """Kill a worker that does not answer, and replace it."""
        worker.process.kill()  # SIGKILL also ends stopped processes
        worker.process.wait()
        worker.stop()
        if not worker.ready:
            self._killed_early += 1
            if self._killed_early > KILLED_EARLY:
                raise FedcoreError(
                    f"a worker process was not ready within {max(self._timeout or 0, STARTS_WITHIN):g} s, "
                    f"{self._killed_early} times. --workers 0 runs everything in one process."
                )
        message = f"no answer within {self._timeout:g} s (--client-timeout); its worker process was killed"
        self._dispatcher.replace(worker, self._new_worker(), message)

    def _replace(self, worker: _Worker) -> None:
        """Replace a worker that died."""
        code = worker.process.wait()
        worker.stop()
        killed = code < 0 and self._killed_early < KILLED_EARLY
        self._killed_early += killed and not worker.ready
        if not worker.ready and not killed:
            raise FedcoreError(
                f"a worker process ended with exit code {code} before it was ready; its output above says why. "
                "--workers 0 runs everything in one process."
            )
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._dispatcher.replace(worker, self._new_worker(), f"the worker process ended ({ended})")
