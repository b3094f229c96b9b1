"""The server's SuperLink: the process of Flower that exchanges messages with the clients' SuperNodes.

It runs with ``--isolation process``, so this process can take over the server side of the run and use its grid.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedcore import ConfigError, FedcoreError
from fedcore_flower.keys import PublicKey, Tls
from fedcore_flower.node import ACQUIRE
from fedcore_flower.processes import Child
from fedcore_flower.superlink_app import HEADER

READY_WITHIN = 600.0
"""The seconds in which the SuperLink must answer. Flower's first imports take long on a busy machine."""

HEARTBEAT_EVERY = 8.0
ANYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared with the user's --host
"""The hosts that stand for all interfaces."""

APP = {
    "pyproject.toml": b"""[project]
name = "fedcore-federation"
version = "1.0.0"
description = "A run of fedcore; fedcore federate client takes part in it"

[tool.flwr.app]
publisher = "fedcore"

[tool.flwr.app.components]
serverapp = "fedcore_federation:server"
clientapp = "fedcore_federation:client"
""",
    "fedcore_federation.py": b'''"""This app is not executed: clients answer with their own fedcore."""

raise ImportError("take part in this run with: fedcore federate client")
''',
}
"""Flower needs an app for every run. This one is never executed; it tells users of other clients how to take part."""


class MalformedReply(Exception):
    """Flower cannot decode what a node sent."""


class _Secret:
    """Adds the owner's secret to requests to the Control API."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret.hex()

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send one request."""
        context.request.headers[HEADER] = self._secret
        response: httpx.Response = call_next(context)
        return response


class SuperLink:
    """A SuperLink with one run. This process is the server side of the run.

    :param host: the interface that it listens on.
    :param port: the port that it listens on.
    :param home: a private folder for Flower's files and the log.
    """

    def __init__(self, host: str, port: int, tls: Tls, home: Path) -> None:
        self._host, self._port, self._tls, self._home = host, port, tls, home
        self._secret = secrets.token_bytes(32)
        self._address = f"{'127.0.0.1' if host in ANYWHERE else host}:{port}"
        self._ca = tls.ca.read_bytes()
        self._child: Child | None = None
        self._grid: HttpGrid | None = None
        self._task: RuntimeHttpClient | None = None
        self._closing = threading.Event()

    @property
    def grid(self) -> HttpGrid:
        """The run's grid."""
        assert self._grid is not None
        return self._grid

    def start(self) -> None:
        """Start the SuperLink and wait until it answers.

        :raises ConfigError: it cannot listen at its address, or its certificate is not valid for the address.
        :raises FedcoreError: it ended, or does not answer.
        """
        _check_free(self._host, self._port)
        secret_file = self._home / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_bytes(self._secret)
        tls = self._tls
        arguments = ["--host", self._host, "--port", str(self._port)]
        arguments += ["--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate)]
        arguments += ["--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(secret_file)]
        arguments += ["--disable-runtime-dependency-installation"]
        self._child = Child(
            "fedcore_flower.superlink_app:main",
            arguments,
            log=self._home / "superlink.log",
            env={"FLWR_HOME": str(self._home)},
        )
        self._wait_until_ready()

    def register(self, keys: Sequence[PublicKey]) -> list[int]:
        """Register the nodes that may connect, by their keys. Return their ids."""
        with contextlib.closing(self._control()) as control:
            return [int(control.RegisterNode(RegisterNodeRequest(public_key=key.pem)).node_id) for key in keys]

    def open_run(self) -> None:
        """Start a run, and take over its server side."""
        fab_bytes, _ = build_fab_from_files(dict(APP))
        fab = Fab(hashlib.sha256(fab_bytes).hexdigest(), fab_bytes, {})
        with contextlib.closing(self._control()) as control:
            if not control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).HasField("run_id"):
                raise FedcoreError(f"the SuperLink did not start a run; its log ends with:\n{self._tail()}")
        auth = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods={ACQUIRE})
        with contextlib.closing(self._runtime(auth)) as runtime:
            token = self._acquire(runtime)
        self._task = self._runtime(RuntimeTokenHttpInterceptor(token))
        taken = self._task.PullTaskInput(PullTaskInputRequest())
        run = run_from_proto(taken.run)
        TaskIdentity.task_id, TaskIdentity.run_id = taken.task_id, run.run_id
        TaskIdentity.node_id = taken.context.node_id
        self._grid = HttpGrid(self._address, False, self._ca, token=token)
        self._grid.set_run(run)
        threading.Thread(target=self._watch, args=(self._grid, self._task), daemon=True).start()

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the grid and return its result.

        :raises FedcoreError: the SuperLink has ended, or no longer knows the run.
        :raises MalformedReply: Flower cannot decode the answer.
        """
        try:
            return function(*arguments)
        except (httpx.HTTPError, RunNotRunningException) as error:
            raise self._failure(error) from error
        except Exception as error:  # a node's message may raise any exception in Flower's decoders
            raise MalformedReply(f"{type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """End the run and the SuperLink."""
        self._closing.set()
        if self._task is not None:
            with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):
                if self._child is not None and self._child.exit_code is None:
                    self._task.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
            self._task.close()
        if self._grid is not None:
            self._grid.close()
        if self._child is not None:
            self._child.stop()

    def _wait_until_ready(self) -> None:
        assert self._child is not None
        give_up = time.monotonic() + READY_WITHIN
        while time.monotonic() < give_up:
            if self._child.exit_code is not None:
                raise self._failure()
            try:
                with contextlib.closing(self._runtime(RuntimeTokenHttpInterceptor("none"))) as client:
                    client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPStatusError:
                return  # it answers that it does not know the token
            except httpx.HTTPError as error:
                if "certificate" in str(error).lower():
                    raise ConfigError(
                        f"the SuperLink's certificate {self._tls.certificate} is not valid for "
                        f"{self._address.rpartition(':')[0]}, the address under which this process connects to it, or "
                        f"{self._tls.ca} did not sign it: {error}"
                    ) from error
            time.sleep(0.1)
        raise FedcoreError(
            f"the SuperLink does not answer at {self._address} within {READY_WITHIN:.0f} s; its log ends with:\n"
            f"{self._tail()}"
        )

    def _acquire(self, runtime: RuntimeHttpClient) -> str:
        give_up = time.monotonic() + READY_WITHIN
        while time.monotonic() < give_up:
            found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if found.token:
                return str(found.token)
            time.sleep(0.05)
        raise FedcoreError(f"the SuperLink does not start the run; its log ends with:\n{self._tail()}")

    def _watch(self, grid: HttpGrid, task: RuntimeHttpClient) -> None:
        """Send heartbeats for the run. If the SuperLink ends, let the grid's calls fail instead of waiting for ever."""
        assert self._child is not None
        last_heartbeat = 0.0
        while not self._closing.wait(0.2):
            if self._child.exit_code is not None:
                grid._retry_invoker.max_tries = 1
                return
            if time.monotonic() - last_heartbeat > HEARTBEAT_EVERY:
                last_heartbeat = time.monotonic()
                with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):
                    task.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def _failure(self, error: Exception | None = None) -> FedcoreError:
        """Return the reason why the SuperLink ended. If it still runs, return the error of a call."""
        if self._child is None or self._child.exit_code is None:
            return FedcoreError(f"the SuperLink failed: {type(error).__name__}: {error}")
        return FedcoreError(
            f"the SuperLink ended with exit code {self._child.exit_code}; its log ends with:\n{self._tail()}"
        )

    def _tail(self) -> str:
        return self._child.tail() if self._child else ""

    def _control(self) -> ControlHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(self._address, False, self._ca, [_Secret(self._secret), version])

    def _runtime(self, interceptor: Any) -> RuntimeHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr-serverapp")
        return RuntimeHttpClient.from_server_address(self._address, False, self._ca, [version, interceptor])


def _check_free(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from error
