"""The Ray cluster of a run: a new one on this machine, or a running one. All code that needs ray is here."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray._private.worker as ray_worker
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedcore import ConfigError, FedcoreError
from fedcore.engines import cores
from fedcore.tools import process
from fedcore_ray.host import Host
from fedcore_ray.options import RayOptions
from fedcore_ray.owned_folder import OwnedFolder, remove_abandoned
from fedcore_ray.payload import Bytes
from fedcore_workers import TEMPLATE

PREFIX = "fedcore-ray-"
REACHED_WITHIN = 10.0
"""Seconds within which a cluster's head has to take a connection."""
INHERITED = ("PYTHONPATH", "FEDCORE_DATA", "FEDCORE_DEBUG")
"""Variables of the run's own environment that its workers have, too."""
RELATIVE = {"PYTHONPATH", "FEDCORE_DATA"}


_PRINT = ray_worker.print_to_stdstream


class WorkerLost(Exception):
    """A worker is gone, and its answer with it; the message is for the run's records: it names no machine.

    :ivar hopeless: whether the next one would end the same way.
    :ivar details: what Ray says.
    """

    def __init__(self, message: str, details: str = "", *, hopeless: bool = False) -> None:
        super().__init__(message)
        self.details, self.hopeless = details or message, hopeless


class WorkerRaised(Exception):
    """A fault of the worker's own code; the worker is still there."""


class Cluster:
    """A connection to Ray, shared by the engines of this process.

    :param gpus: GPUs that each worker takes.
    :ivar own: whether this process started it, for itself.
    :raises FedcoreError: there is no Ray where ``options.address`` says, or it is of another version.
    """

    _lock = threading.Lock()
    _users = 0
    _connected = False  # by one of these objects, not by the caller
    _folder: OwnedFolder | None = None

    def __init__(self, options: RayOptions, gpus: float) -> None:
        self.options, self.gpus = options, gpus
        with Cluster._lock:
            if not ray.is_initialized():
                Cluster._folder = _connect(options)
                Cluster._connected, Cluster._users = True, 0
            elif options.address not in (None, "auto", _head()):
                raise ConfigError(
                    f"ray.address is {options.address}, but this process is connected to the Ray at {_head()}; "
                    "call ray.shutdown() first"
                )
            self.own = Cluster._folder is not None
            Cluster._users += 1
        self._released = False

    def release(self) -> None:
        """Let go of it, and disconnect with the last who does; idempotent."""
        with Cluster._lock:
            if self._released:
                return
            self._released = True
            Cluster._users -= 1
            if Cluster._users or not Cluster._connected:
                return
            ray.shutdown()
            ray_worker.print_to_stdstream = _PRINT
            Cluster._connected = False
            folder, Cluster._folder = Cluster._folder, None
            if folder is not None:
                folder.remove()

    def worker_count(self, wanted: int | None, clients: int) -> int:
        """Return how many workers to start: as many as the cluster has room for, or ``wanted``.

        :raises ConfigError: the cluster has no room for so many.
        """
        room = sum(self._room(node) for node in self._nodes())
        need = f"{self.options.cpus_per_worker:g} CPUs" + f" and {self.gpus:g} GPUs" * (self.gpus > 0)
        if room == 0:
            raise ConfigError(f"no node of the Ray cluster has the {need} that a worker takes; it offers {_offer()}")
        count = min(wanted or room, clients)  # more would never have a task
        if count > room and not self._uncounted:
            raise ConfigError(
                f"--workers {wanted}: the Ray cluster has room for {room} workers of {need} each; it offers "
                f"{_offer()}. Ask for fewer, or let several share a CPU or GPU: --set ray.cpus_per_worker=0.5, "
                "--set ray.gpus_per_worker=0.5"
            )
        return count

    def start_worker(self) -> Any:
        """Start a worker, on the node with the fewest; returns the handle of a :class:`Host`."""
        actor = ray.remote(Host).options(
            num_cpus=0 if self._uncounted else self.options.cpus_per_worker,
            num_gpus=self.gpus,
            max_restarts=0,  # the engine replaces a lost worker: so it notices one that is lost again and again
            max_task_retries=0,  # nothing trains twice
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment()},
        )
        return actor.remote()

    def end_worker(self, actor: Any) -> None:
        """End a worker, at once; it may be gone, and the cluster with it."""
        with contextlib.suppress(RayError):
            ray.kill(actor, no_restart=True)

    def put(self, packed: Bytes) -> Any:
        """Put bytes into the object store; returns what stands for them until it is forgotten."""
        return ray.put(packed)

    def wait(self, answers: Sequence[Any], seconds: float | None) -> list[Any]:
        """Wait for the first of several answers; none where the time is up."""
        done, _ = ray.wait(list(answers), num_returns=1, timeout=seconds)
        return list(done)

    def read(self, answer: Any) -> Bytes:
        """Return an answer's bytes, in memory that may be written to.

        :raises WorkerLost: the worker, or its node, is gone.
        :raises WorkerRaised: it is there, but its own code failed.
        """
        try:
            packed: Bytes = ray.get(answer)
        except RayTaskError as error:
            raise WorkerRaised(first_line(error)) from error
        except RayError as error:
            hopeless = isinstance(error, ActorDiedError) and error.actor_init_failed
            raise WorkerLost(_why(error), first_line(error), hopeless=hopeless) from error
        return packed.copy()

    def on_each_node(self, function: Any, *arguments: Any) -> Iterator[tuple[str, Any]]:
        """Run a function once on every node that has room for a worker; yields each node's name and what it returned.

        :raises FedcoreError: it cannot be run there; names the node.
        """
        started = [(name_of(node), self._start_on(node, function, *arguments)) for node in self._nodes()]
        for name, answer in started:
            try:
                yield name, ray.get(answer, timeout=self.options.start_timeout)
            except RayError as error:
                raise FedcoreError(
                    f"{name} cannot run fedcore's workers: {first_line(error)}. Install the same packages on every "
                    "node, and start Ray from that environment"
                ) from error

    def _start_on(self, node: Mapping[str, Any], function: Any, *arguments: Any) -> Any:
        task = ray.remote(function).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": environment()},
        )
        return task.remote(*arguments)

    @property
    def _uncounted(self) -> bool:
        """Whether Ray need not count CPUs: this machine's are the run's own, which counts itself."""
        return self.own and not self.gpus

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in _alive_nodes() if self._room(node)]

    def _room(self, node: Mapping[str, Any]) -> int:
        resources: dict[str, float] = node["Resources"]
        shares = [(resources.get("CPU", 0.0), self.options.cpus_per_worker), (resources.get("GPU", 0.0), self.gpus)]
        return min(math.floor(available / needed + 1e-9) for available, needed in shares if needed)


def environment() -> dict[str, str]:
    """Return the variables that a worker starts with: one thread, and the local engine's allocator."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    for name in inherited.keys() & RELATIVE:  # to this process's folder, in which no worker starts
        places = inherited[name].split(os.pathsep)
        inherited[name] = os.pathsep.join(os.path.abspath(os.path.expanduser(place)) for place in places)
    return {**TEMPLATE, process.CORES: "1", **inherited}


def name_of(node: Mapping[str, Any]) -> str:
    """Return a node's readable name."""
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def first_line(error: BaseException) -> str:
    """Return what an error of Ray says in one line: its cause, where it has one."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].rstrip(".")[:300]


def _why(error: RayError) -> str:
    text = str(error).lower()
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "low on memory" in text:
        return "the worker was ended for want of memory on its node"
    if isinstance(error, ray.exceptions.NodeDiedError) or "node is dead" in text or "node died" in text:
        return "the worker's node is gone"
    return "the worker's process is gone"


def _connect(options: RayOptions) -> OwnedFolder | None:
    """Start a Ray cluster for this process, or join a running one; returns the folder of the former.

    Workers import from the folder that this process is in while Ray starts. It may be untrusted: another one is used.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # explicit, so that Ray does not announce a change
    ray_worker.print_to_stdstream = _print_to_stderr
    quiet: dict[str, Any] = {"log_to_driver": "FEDCORE_DEBUG" in os.environ, "logging_level": logging.ERROR}
    if options.address is not None:
        _require_reachable(options.address)
        try:
            with _own_signals(), contextlib.chdir("/"):
                ray.init(options.address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            raise FedcoreError(_nothing_at(options.address, error)) from error
        return None
    # Ray asks for a token; without this it would write one into the home folder, readable by every user.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Short: Ray makes sockets in it, and a socket's path has at most 107 characters.
    place = Path("/tmp")  # noqa: S108 - the folder below it is private
    remove_abandoned(place, PREFIX)
    folder = OwnedFolder(place, PREFIX)
    try:
        with _own_signals(), contextlib.chdir(folder.path):
            ray.init("local", num_cpus=cores(), include_dashboard=False, _temp_dir=str(folder.path), **quiet)
    except BaseException as error:
        ray.shutdown()
        folder.remove()
        if isinstance(error, (ConnectionError, RuntimeError, ValueError, OSError, RayError)):
            raise FedcoreError(f"Ray cannot be started on this machine: {first_line(error)}") from error
        raise
    return folder


def _require_reachable(address: str) -> None:
    """Refuse an address where no process listens; Ray itself goes on trying for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # Ray finds out by itself, at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise FedcoreError(_nothing_at(address, error)) from error


def _nothing_at(address: str, error: BaseException) -> str:
    return (
        f"there is no Ray that this run can join at {address!r}: {first_line(error)}. Start the head with ray start "
        "--head and each other machine with ray start --address=HOST:PORT, all of this Ray's version "
        f"({ray.__version__}), and the run on one of them"
    )


def _print_to_stderr(data: dict[str, Any], *rest: Any, **options: Any) -> None:
    """Stand in for what prints the words of Ray's processes: to stdout, where --json has its figures, and always.

    They are shown with --debug; what happened to a worker is in the run's records.
    """
    if "FEDCORE_DEBUG" in os.environ:
        _PRINT({**data, "is_err": True}, *rest, **options)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what this process does at SIGTERM; Ray would have it exit without a checkpoint."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _head() -> str:
    """Return the address of the Ray that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _offer() -> str:
    nodes = [node["Resources"] for node in _alive_nodes()]
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    return f"{cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} node{'s' * (len(nodes) != 1)}"
