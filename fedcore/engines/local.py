"""The default engine: worker processes on this machine, or this process itself.

CPU: persistent workers of one thread each (a single worker is a process, too, so that bits do not depend on the
number of workers); data and weights go through shared memory. CUDA, or ``workers = 0``: in this process.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fedcore.base.errors import ConfigError, FedcoreError
from fedcore.base.process import CORES, command, cores, environment
from fedcore.base.tensors import bytes_of
from fedcore.client.captured_steps import captures
from fedcore.client.messages import BUNDLE, ClientFailure, ClientTask, Outcome, pack_task
from fedcore.client.worker_spec import WorkerSpec, pack_objects, pack_worker_spec
from fedcore.engines.buffers import Buffers
from fedcore.engines.bundles import Pace, bundled, join_tasks, pack_bundle, split_outcomes
from fedcore.engines.channel import WORKER_SPEC, Channel, Spool, socket_pair
from fedcore.engines.dispatch import Dispatcher, Pair
from fedcore.engines.in_process import InProcessEngine, LanesEngine
from fedcore.models.placement import resolve_device

KILLED_EARLY = 3
"""How many workers of a run that are killed before they are ready are replaced; one more ends the run."""

STARTS_WITHIN = 120.0
"""Lower bound, in seconds, of the time limit until a worker is ready; it imports torch first."""

STOPS_WITHIN = 3.0
"""Seconds after which idle workers that were asked to stop are killed."""

LONGEST_POLL = 2**31 - 1
"""Milliseconds, 24 days, that poll takes at most; a longer wait is several."""

# By default glibc returns freed activations to the kernel, and every step page-faults them in again.
ALLOCATOR = {
    "GLIBC_TUNABLES": ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"])),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def LocalEngine(spec: WorkerSpec) -> InProcessEngine | WorkerEngine:  # noqa: N802 - named by an entry point as a class
    """Return the engine for the run's device and number of workers and lanes."""
    config, device = spec.config, resolve_device(spec.config.device)
    workers, lanes = config.workers, min(config.lanes, config.clients)
    if workers == 0 or (device.type == "cuda" and workers is None):
        if config.client_timeout is not None:
            raise ConfigError("--client-timeout needs worker processes, which can be killed: --workers 1 or more")
        if lanes > 1 and captures(config, device, spec.dataset):
            return LanesEngine(spec, lanes)
        return InProcessEngine(spec)
    return WorkerEngine(spec, min(workers or cores(), config.clients))  # further workers would never have a task


class Process(Protocol):
    """What the engine needs of a worker process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """The process id."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises ``subprocess.TimeoutExpired``."""

    def kill(self) -> None:
        """Kill the process, if it runs."""


def start_worker(connection: socket.socket, spool: Path) -> Process:
    """Start a worker process for its end of a channel; tests replace it by a fork."""
    return subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
        command("fedcore.engines.worker", str(connection.fileno()), str(spool), str(os.getpid())),
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        # The engine handles Ctrl-C. A separate process group, but in the engine's session: when the engine
        # dies, the kernel wakes the group's stopped processes, which then end, too.
        process_group=0,
        env=worker_environment(),
    )


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker process."""
    return environment(**ALLOCATOR, **{CORES: "1"}, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


class _Worker:
    """One worker process and our end of its channel."""

    def __init__(self, spool: Spool, buffers: Buffers, objects: bytes) -> None:
        self.since = time.monotonic()  # monotonic time of its start, or of its task's
        connection, theirs = socket_pair()
        with theirs:
            self.process = start_worker(theirs, spool.path)
        self.channel = Channel(connection, spool, buffers)
        with contextlib.suppress(OSError):  # a dead worker is detected by _collect
            self.channel.send_bytes(objects)
        self.task: ClientTask | None = None
        self.ready = False

    def start(self, task: ClientTask) -> None:
        self.task, self.since = task, time.monotonic()
        with contextlib.suppress(EOFError, OSError):  # a dead worker is detected by _collect
            self.channel.send("task", *(pack_bundle(task) if task.kind == BUNDLE else pack_task(task)))

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the worker may be dead
            self.channel.send("stop", {}, None)
        self.channel.close()


class WorkerEngine:
    """Runs tasks on worker processes; a worker that dies is replaced and its task becomes a failure."""

    def __init__(self, spec: WorkerSpec, workers: int) -> None:
        self.workers = workers
        self._killed_early = 0
        self._pace = Pace()
        self._timeout = spec.config.client_timeout
        self._dispatcher: Dispatcher[_Worker] = Dispatcher([])
        tensors, meta = pack_worker_spec(spec)
        self._objects = pack_objects(spec)
        self._folders = Spool.make_folders(bytes_of(tensors))
        self._spool = Spool(self._folders[0].path)
        self._buffers = Buffers(self._spool.path)
        try:
            self._spool.put(WORKER_SPEC, tensors, meta)
            for _ in range(workers):
                self._dispatcher.workers.append(self._new_worker())
        except BaseException:
            self.close()
            raise

    def _new_worker(self) -> _Worker:
        return _Worker(self._spool, self._buffers, self._objects)

    def share(self, key: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Write a payload to shared memory, once for all workers."""
        self._spool.put(key, tensors, meta)

    def unshare(self, key: str) -> None:
        """Delete a payload."""
        self._spool.delete(key)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[tuple[ClientTask, Outcome]]:
        """Run tasks side by side and yield each as it finishes; a live session's task waits for its worker.

        Short tasks share a message. If a worker dies at one with several, each of these runs again, alone, so that only
        the task that ends its worker fails.
        """
        if window is not None or self._timeout is not None:  # they are about single tasks
            yield from self._dispatcher.run(tasks, self._collect, window=window)
            return
        groups = bundled(tasks, self._pace, self.workers)
        sent = [group[0] if len(group) == 1 else join_tasks(group) for group in groups]
        again: list[ClientTask] = []
        for task, outcome in self._dispatcher.run(sent, self._collect, window=None):
            if task.kind != BUNDLE:
                yield self._noted(task, outcome)
            elif isinstance(outcome, ClientFailure):
                again += task.meta["tasks"]
            else:
                for own, own_outcome in zip(task.meta["tasks"], split_outcomes(outcome), strict=True):
                    yield self._noted(own, own_outcome)
        yield from self._dispatcher.run(again, self._collect, window=None)

    def _noted(self, task: ClientTask, outcome: Outcome) -> Pair:
        self._pace.note(task, outcome)
        return task, outcome

    def close(self) -> None:
        """Stop the workers and free shared memory."""
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
        for folder in self._folders:
            folder.remove()

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
            worker = connections[connection]
            try:
                kind, tensors, meta = worker.channel.receive()
            except EOFError:
                self._replace(worker)
                continue
            self._dispatcher.take(worker, kind, tensors, meta)

    def _patience(self) -> float | None:
        """Return the seconds until the next worker is overdue; None without a time limit."""
        left = [self._limit(worker) - time.monotonic() for worker in self._at_work()]
        return max(0.0, min(left)) if left else None

    def _overdue(self) -> list[_Worker]:
        return [worker for worker in self._at_work() if time.monotonic() >= self._limit(worker)]

    def _at_work(self) -> list[_Worker]:
        """Return the workers that owe an answer within a time limit."""
        waited_for = [w for w in self._dispatcher.workers if w.task is not None or not w.ready]
        return [] if self._timeout is None else waited_for

    def _limit(self, worker: _Worker) -> float:
        """Return the monotonic time at which a worker is overdue."""
        assert self._timeout is not None
        return worker.since + (self._timeout if worker.ready else max(self._timeout, STARTS_WITHIN))

    def _give_up(self, worker: _Worker) -> None:
        """Kill a worker that does not answer, and replace it."""
        worker.process.kill()  # SIGKILL ends stopped processes, too
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
