"""The engine: tasks to the workers of a cluster, outcomes as they come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fedcore import ConfigError, FedcoreError
from fedcore.engines import ClientFailure, ClientSite, ClientTask, FailureKind, Pair, SharedPayload
from fedcore.tools import RunFiles
from fedcore_ray.last_words import LastWords
from fedcore_ray.options import RayOptions
from fedcore_ray.payload import pack, view
from fedcore_workers import Dispatcher, pack_shared, pack_site, pack_task

if TYPE_CHECKING:
    from fedcore_ray.cluster import Cluster, WorkerLost

DIED_EARLY = 3
"""How often in a row a worker may be lost before it was ready, and is replaced: once more, and it is no accident."""


class RayEngine:
    """Runs tasks on Ray's workers, each of which hosts any client; one that is lost is replaced.

    :raises ConfigError: options that do not fit the run or the cluster; a node that differs from this machine.
    :raises FedcoreError: there is no Ray to join, or none can be started.
    """

    Options = RayOptions

    def __init__(self, site: ClientSite) -> None:
        self.options = RayOptions.model_validate(site.config.engine_options)
        self._limit = self.options.timeout or site.config.client_timeout
        gpus = _gpus(site, self.options)
        from fedcore_ray.cluster import Cluster  # here: the options alone need no ray

        self._shared: dict[str, Any] = {}
        self._last_words: LastWords | None = None
        self._dispatcher: Dispatcher[_Worker] = Dispatcher([])
        self._cluster = Cluster(self.options, gpus)
        try:
            go_on = RunFiles(site.state_dir.parent).how_to_resume
            self._last_words = LastWords(
                "stopped: the run's process was killed, or Ray ended it because a part of Ray on this machine was "
                f"killed (raylet, agent or head; for want of memory, for example). Go on with: {go_on}"
            )
            self.workers = self._cluster.worker_count(site.config.workers, site.config.clients)
            if not self._cluster.own:
                from fedcore_ray.nodes import check_nodes

                check_nodes(self._cluster, site.state_dir)
            self._site: Any = self._cluster.put(pack(pack_site(_from_anywhere(site)), None))
            self._none_since = time.monotonic()  # when the last ready worker was lost
            for _ in range(self.workers):
                self._dispatcher.workers.append(_Worker(self._cluster, self._site, self._shared))
        except BaseException:
            self.close()
            raise

    def share(self, key: str, payload: SharedPayload) -> None:
        """Put a payload into the object store, once; every node fetches it once."""
        self._shared[key] = self._cluster.put(pack(*pack_shared(payload)))

    def unshare(self, key: str) -> None:
        """Let the object store forget a payload."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks side by side and yield each as it finishes; a live session's task waits for its worker."""
        yield from self._dispatcher.run(tasks, self._collect, window=window)

    def close(self) -> None:
        """End the workers, and Ray itself if this run started it."""
        for worker in self._dispatcher.workers:
            worker.end()
        self._dispatcher.workers.clear()
        self._shared.clear()
        self._site = None
        self._cluster.release()
        if self._last_words is not None:
            self._last_words.take_back()

    def _collect(self) -> None:
        """Wait until a worker has something to say, or until one's time is up."""
        answers = {worker.answer: worker for worker in self._dispatcher.workers if worker.answer is not None}
        done = self._cluster.wait(list(answers), self._patience())
        for answer in done:
            self._take(answers[answer])
        if not done:
            self._give_up()

    def _take(self, worker: _Worker) -> None:
        """Put a worker's message where it is waited for."""
        from fedcore_ray.cluster import WorkerLost, WorkerRaised

        answer, worker.answer = worker.answer, None
        try:
            tensors, (kind, meta) = view(self._cluster.read(answer))
        except WorkerLost as error:
            self._lose(worker, error)
        except WorkerRaised as error:
            if worker.task is None:
                raise FedcoreError(f"a Ray worker cannot set the clients up: {error}") from error
            self._dispatcher.finish(worker, ClientFailure("raised", str(error)))
        else:
            self._dispatcher.take(worker, kind, tensors, meta)

    def _lose(self, worker: _Worker, error: WorkerLost) -> None:
        attempt = 0 if worker.ready else worker.attempt + 1
        if attempt and (error.hopeless or attempt > DIED_EARLY):
            raise FedcoreError(
                f"a Ray worker was lost before it was ready, {attempt} times in a row: {error.details}. Its own output "
                "is in Ray's logs on its node; --debug shows it"
            ) from error
        self._replace(worker, str(error), "worker_lost", attempt)

    def _replace(self, worker: _Worker, why: str, kind: FailureKind, attempt: int = 0) -> None:
        """Start a new worker in the place of one that is lost, or too late."""
        worker.end()
        self._dispatcher.replace(worker, _Worker(self._cluster, self._site, self._shared, attempt), why, kind)
        if not self._any_ready():
            self._none_since = time.monotonic()

    def _patience(self) -> float | None:
        """Return the seconds until the first worker's time is up; None where none has a limit."""
        limits = [since + self._limit for since in self._at_work().values()] if self._limit else []
        if not self._any_ready():
            limits.append(self._none_since + self.options.start_timeout)
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _give_up(self) -> None:
        """Replace the workers whose time is up."""
        now, limit = time.monotonic(), self._limit
        if not self._any_ready() and now >= self._none_since + self.options.start_timeout:
            raise FedcoreError(
                f"no Ray worker was ready within {self.options.start_timeout:g} s; the cluster may be busy: ray status "
                "tells. --set ray.start_timeout=SECONDS waits longer"
            )
        for worker, since in self._at_work().items():
            if limit is not None and now >= since + limit:
                self._replace(worker, f"no answer within {limit:g} s; its worker was replaced", "timeout")

    def _any_ready(self) -> bool:
        return any(worker.ready for worker in self._dispatcher.workers)

    def _at_work(self) -> dict[_Worker, float]:
        """Return the workers that are at a task, and since when."""
        return {worker: worker.since for worker in self._dispatcher.workers if worker.task is not None}


class _Worker:
    """One actor, what it is at, and the answer that it owes.

    :ivar answer: stands for what Ray will have of it; None while nothing is asked.
    :ivar since: when it was asked, in seconds.
    :ivar attempt: how many before it in its place were lost in a row, none of them ever ready.
    """

    def __init__(self, cluster: Cluster, site: Any, shared: Mapping[str, Any], attempt: int = 0) -> None:
        self._cluster, self._shared, self.attempt = cluster, shared, attempt
        self.task: ClientTask | None = None
        self.ready, self.since = False, time.monotonic()
        self._actor = cluster.start_worker()
        self.answer: Any = self._actor.set_up.remote(site, os.getcwd())

    def start(self, task: ClientTask) -> None:
        self.task, self.since = task, time.monotonic()
        self.answer = self._actor.run.remote(pack(*pack_task(task)), self._shared.get(task.shared or ""))

    def end(self) -> None:
        self.answer = None
        self._cluster.end_worker(self._actor)


def _from_anywhere(site: ClientSite) -> ClientSite:
    """Return a site that means the same in a process that starts in another folder."""
    if site.config.data_dir is None:
        return site
    return replace(site, config=site.config.model_copy(update={"data_dir": site.config.data_dir.absolute()}))


def _gpus(site: ClientSite, options: RayOptions) -> float:
    """Return the GPUs that each worker takes.

    :raises ConfigError: the run's device and its workers contradict each other.
    """
    if site.config.workers == 0:
        raise ConfigError(
            "--workers 0 is this process, but --engine ray runs the clients on Ray's workers: write 1 or more"
        )
    on_gpu = torch.device(site.config.device).type == "cuda"
    gpus = float(on_gpu) if options.gpus_per_worker is None else options.gpus_per_worker
    if on_gpu and not gpus:
        raise ConfigError("ray.gpus_per_worker is 0, but the run's device is cuda: give each worker a part of a GPU")
    if gpus and not on_gpu:
        raise ConfigError(
            f"ray.gpus_per_worker is {gpus:g}, but the run's device is {site.config.device}: leave it out, or write "
            "--device cuda"
        )
    return gpus
