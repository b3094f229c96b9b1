"""The engine of worker processes on this machine.

Clients run in persistent processes of one thread each. Data and weights go through shared memory. A single worker is
also a process, so that bits do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from fedcore import FedcoreError, Tensors
from fedcore.client import runner_of
from fedcore.engines import (
    ClientFailure,
    ClientSite,
    ClientTask,
    Pair,
    SharedPayload,
    alike,
    cores,
    groups_of,
)
from fedcore.tools import process, registry
from fedcore_workers.dispatch import Bundle, Dispatcher
from fedcore_workers.forks import TEMPLATE, ForkedProcess, current, template
from fedcore_workers.messages import pack_shared, pack_site, pack_tasks, unpack_outcomes
from fedcore_workers.transport import Channel, get_frame, put_frame

SITE = "site"
"""The key of the packed site among the payloads."""

LOST_EARLY = 3
"""Maximum number of replaced workers that were killed before they were ready, times the workers. One more ends the run.

A template that is killed takes all of them with it.
"""

STARTS_WITHIN = 120.0
"""Lower bound, in seconds, of the time limit until a worker is ready. The worker first has to import torch."""

STOPS_WITHIN = 3.0
"""Seconds that idle workers have to stop before they are killed."""


def start_worker(connection: socket.socket) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a worker process with its end of a channel, by a fork where there is a template."""
    fd, template = connection.fileno(), current()
    if template is not None:
        variables = worker_environment()
        return template.fork("fedcore_workers.worker:main", [fd], environment=variables, descriptors={fd: fd})
    return subprocess.Popen(  # noqa: S603 - our own module, fixed arguments
        process.python_command("fedcore_workers.worker", str(fd), str(os.getpid())),
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the engine's own business
        env=worker_environment(),
    )


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker process."""
    return process.environment(**TEMPLATE, **{process.CORES: "1"})


class _Worker:
    """One worker process and this end of its channel.

    :param shared: key -> descriptor of each shared payload, and of the packed site.
    :param timeout: the limit for a client's answer, in seconds; None for no limit.
    """

    def __init__(self, shared: dict[str, int], timeout: float | None) -> None:
        self.since = time.monotonic()  # start of the process, later of its task
        connection, theirs = socket.socketpair()
        with theirs:
            self.process = start_worker(theirs)
        connection.settimeout(timeout)  # it may stop in the middle of a message
        self.channel = Channel(connection)
        self.task: ClientTask | None = None
        self.ready = False
        self._shared, self._payload_key = shared, SITE  # the payload that the process has
        self._send({}, None, shared[SITE])

    def start(self, task: ClientTask) -> None:
        self.task, self.since = task, time.monotonic()
        descriptor = None if task.shared in (None, self._payload_key) else self._shared[task.shared]
        self._payload_key = task.shared or self._payload_key
        self._send(*pack_tasks(task.tasks if isinstance(task, Bundle) else [task]), descriptor)

    def _send(self, tensors: Tensors, value: Any, descriptor: int | None) -> None:
        with contextlib.suppress(OSError):  # the engine finds a dead worker when it waits for the answer
            self.channel.send(tensors, value, descriptor=descriptor)

    def stop(self) -> None:
        self.channel.connection.close()


class WorkerEngine:
    """Runs tasks on worker processes; a worker that dies is replaced and its task becomes a failure."""

    def __init__(self, site: ClientSite) -> None:
        # Further workers would never have a task.
        self.workers = min(site.config.workers or cores(), site.partition.num_clients)
        self._lost_early = 0
        self._warned: set[str] = set()  # the workers' warnings that were printed
        self._seconds: dict[str, float] = {}  # of the workers' processors for a task, by kind
        self._timeout, self.together = site.config.client_timeout, runner_of(site.config, site.dataset).together
        self._dispatcher: Dispatcher[_Worker] = Dispatcher([])
        packed = pack_site(site)
        self._shared = {SITE: put_frame(packed, None)}
        self._template = contextlib.ExitStack()
        try:
            self._template.enter_context(template())
            for _ in range(self.workers):
                self._dispatcher.workers.append(_Worker(self._shared, self._timeout))
        except BaseException:
            self.close()
            raise
        # The data set is in memory once for all processes. One of the program may be its memory in other ways, too.
        if not registry.is_lent(site.config.dataset):
            for name, mapped in get_frame(os.dup(self._shared[SITE]))[0].items():
                packed[name].data = mapped

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
        worker fails. Tasks that the runner takes together fail together: alone they could give other bits.
        """
        tasks = list(tasks)
        together = self.together > 1 and all(task.kind == "fit_begin" for task in tasks)
        if together:
            tasks = [Bundle.of(group) for group in groups_of(tasks, self.together)]
        elif window is None and self._timeout is None:  # both limits concern single tasks
            tasks = list(bundled(tasks, self.workers, self._seconds))
        repeated: list[ClientTask] = []
        for task, outcome in self._dispatcher.run(tasks, self._collect, window=window):
            if not isinstance(task, Bundle):
                yield task, outcome
            elif not isinstance(outcome, ClientFailure):
                yield from zip(task.tasks, outcome(), strict=True)
            elif together:
                yield from zip(task.tasks, itertools.repeat(outcome))
            else:
                repeated += task.tasks
        yield from self._dispatcher.run(repeated, self._collect, window=None)

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
        self._template.close()
        for worker in self._dispatcher.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a template that is stopped does not tell their end
                worker.process.wait(timeout=STOPS_WITHIN)
        self._dispatcher.workers.clear()
        for key in list(self._shared):
            self.unshare(key)

    def _collect(self) -> None:
        """Wait for messages of workers, or for a time limit, and report them to the dispatcher."""
        workers = self._dispatcher.workers
        deadline = min(map(self._deadline, workers))
        connections: dict[Any, _Worker] = {worker.channel.connection: worker for worker in workers}
        heard = wait(connections, None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0))
        for connection in heard:
            self._hear(connections[connection])
        for worker in [] if heard else [each for each in workers if self._deadline(each) <= time.monotonic()]:
            self._replace(worker, overdue=True)

    def _deadline(self, worker: _Worker) -> float:
        """Return the monotonic time at which a worker is overdue; infinity without a limit."""
        if self._timeout is None or (worker.ready and worker.task is None):
            return math.inf
        return worker.since + (self._timeout if worker.ready else max(self._timeout, STARTS_WITHIN))

    def _hear(self, worker: _Worker) -> None:
        try:
            tensors, (kind, *details), _ = worker.channel.receive()
        except (EOFError, TimeoutError) as error:
            self._replace(worker, overdue=isinstance(error, TimeoutError))
            return
        if kind == "warning":
            if details[0] not in self._warned:
                self._warned.add(details[0])
                sys.stderr.write(details[0])
            return
        if kind != "outcomes":
            self._dispatcher.take(worker, kind, tensors, *details)
            return
        meta, seconds = details
        task = worker.task
        if task is not None:
            per_task = seconds / (len(task.tasks) if isinstance(task, Bundle) else 1)
            self._seconds[task.kind] = 0.9 * self._seconds.get(task.kind, per_task) + 0.1 * per_task
        unpacked = partial(unpack_outcomes, tensors, meta)  # of a bundle only once the worker has its next task
        self._dispatcher.finish(worker, unpacked if isinstance(task, Bundle) else unpacked()[0])

    def _replace(self, worker: _Worker, *, overdue: bool) -> None:
        """Replace a worker that died, or that does not answer in time.

        :raises FedcoreError: the process ended by itself before it was ready, or too many were lost before that.
        """
        if overdue:
            worker.process.kill()  # SIGKILL also ends stopped processes
        code = worker.process.wait()
        worker.stop()
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not worker.ready:
            self._lost_early += 1
            if code >= 0 or self._lost_early > LOST_EARLY * self.workers:
                late = f"was not ready within {max(self._timeout or 0, STARTS_WITHIN):g} s, {self._lost_early} times"
                details = f", {self._lost_early} times" if code < 0 else "; its output above says why"
                died = f"ended ({ending}) before it was ready{details}"
                raise FedcoreError(
                    f"a worker process {late if overdue else died}. --workers 0 runs everything in one process."
                )
        late = f"no answer within {self._timeout or 0:g} s (--client-timeout); its worker process was killed"
        died = f"the worker process ended ({ending})"
        self._dispatcher.replace(worker, _Worker(self._shared, self._timeout), late if overdue else died)


BUNDLE_SECONDS = 0.05
"""How long a worker's processor is to be busy with one bundle, at most."""
MESSAGE_SECONDS = 0.003
"""What a bundle costs all processes together: a worker is slower at first, and the main process is in its way.

Tasks that take less are assigned with those before them.
"""
ASSIGNED_AT_ONCE = 0.9
"""Share of the remaining tasks that is assigned at once: each message costs, and the rest evens out unequal groups."""


def bundled(tasks: list[ClientTask], workers: int, seconds: Mapping[str, float]) -> Iterator[ClientTask]:
    """Join short tasks; all workers get equally many, and fewer each time, so that they end together.

    Tasks come with the longest first. Assigned to the bundles in turn, they make about the same work of each.

    :param seconds: how long a task takes, by kind, where that is known.
    """
    remaining = len(tasks)
    for (kind, *_), run in itertools.groupby(tasks, alike):
        queue = list(run)
        each = max(seconds.get(kind, BUNDLE_SECONDS), 1e-6)
        least, most = (max(1, int(limit / each)) for limit in (MESSAGE_SECONDS, BUNDLE_SECONDS))
        while queue:
            share = remaining / workers
            at_once = max(least, int(ASSIGNED_AT_ONCE * share))
            per_worker = min(most, math.ceil(share) if share - at_once < least else at_once)
            assigned, queue = queue[: per_worker * workers], queue[per_worker * workers :]
            remaining -= len(assigned)
            for group in (assigned[number::workers] for number in range(min(workers, len(assigned)))):
                yield Bundle.of(group)
