"""The server's SuperLink: the process of Flower that exchanges messages with the clients' SuperNodes.

It runs with ``--isolation process``. A SuperExec of this process starts the ServerApp of the run, which lends its grid
(:mod:`fedcore_flower.server_app`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import files
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.proto.control_pb2 import (
    RegisterNodeRequest,
    RegisterNodeResponse,
    StartRunRequest,
    StartRunResponse,
)
from flwr.proto.fab_pb2 import Fab

from fedcore import ConfigError, FedcoreError
from fedcore_flower.keys import PublicKey, Tls
from fedcore_flower.processes import Child, receive_blobs, send_blobs
from fedcore_flower.server_app import HEAD, SOCKET, Result
from fedcore_flower.superlink_app import HEADER, SECRET_FILE

READY_WITHIN = 600.0
"""The seconds in which the SuperLink and the ServerApp must answer. Flower's imports take long on a busy machine."""

POLL = 0.1
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
serverapp = "fedcore_flower.server_app:app"
clientapp = "fedcore_federation:client"
""",
    "fedcore_federation.py": b'''"""Clients do not execute this app: they answer with their own fedcore."""

raise ImportError("take part in this run with: fedcore federate client")
''',
}
"""Flower needs an app for every run. Its ServerApp is installed here; it tells users of other clients how to take part.
"""


class SuperLink:
    """A SuperLink with one run, and the grid of this run.

    :param host: the interface that it listens on.
    :param port: the port that it listens on.
    :param home: a private folder for Flower's files, the logs and the socket of the ServerApp.
    """

    def __init__(self, host: str, port: int, tls: Tls, home: Path) -> None:
        self._host, self._port, self._tls, self._home = host, port, tls, home
        self._address = f"{'127.0.0.1' if host in ANYWHERE else host}:{port}"
        secret = secrets.token_bytes(32)
        self._secret_file = home / "secret"
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_bytes(secret)
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.load_verify_locations(tls.ca)
        self._http = httpx.Client(base_url=f"https://{self._address}", verify=trusted, trust_env=False)
        self._secret = {HEADER: secret.hex()}
        self._children: dict[str, Child] = {}
        self._app: Connection | None = None

    def start(self) -> None:
        """Start the SuperLink and wait until it answers.

        :raises ConfigError: it cannot listen at its address, or its certificate is not valid for the address.
        :raises FedcoreError: it ended, or does not answer, or answers requests without the secret.
        """
        _check_free(self._host, self._port)
        tls = self._tls
        arguments = ["--host", self._host, "--port", str(self._port)]
        arguments += ["--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate)]
        arguments += ["--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
        arguments += ["--isolation", "process", SECRET_FILE, str(self._secret_file)]
        arguments += ["--disable-runtime-dependency-installation"]
        self._start_child("SuperLink", "fedcore_flower.superlink_app:main", arguments)
        give_up = time.monotonic() + READY_WITHIN
        while time.monotonic() < give_up:
            self._check_children()
            try:
                self._http.get("/health", headers=self._secret).raise_for_status()
            except httpx.HTTPError as error:
                if "certificate" in str(error).lower():
                    raise ConfigError(
                        f"the SuperLink's certificate {tls.certificate} is not valid for "
                        f"{self._address.rpartition(':')[0]}, the address under which this process connects to it, or "
                        f"{tls.ca} did not sign it: {error}"
                    ) from error
                time.sleep(POLL)
                continue
            if self._http.get("/health").status_code != httpx.codes.FORBIDDEN:
                raise FedcoreError("this version of Flower serves its Control API to everyone; install another one")
            return
        raise self._failure(f"the SuperLink does not answer at {self._address} within {READY_WITHIN:.0f} s")

    def register(self, keys: Sequence[PublicKey]) -> list[int]:
        """Register the nodes that may connect, by their keys. Return their ids."""
        requests = [RegisterNodeRequest(public_key=key.pem) for key in keys]
        return [int(self._control("register-node", request, RegisterNodeResponse).node_id) for request in requests]

    def open_run(self) -> None:
        """Start a run and its ServerApp, and wait until the ServerApp lends its grid."""
        content, _ = build_fab_from_files(dict(APP))
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        if not self._control("start-run", StartRunRequest(fab=fab), StartRunResponse).HasField("run_id"):
            raise self._failure("the SuperLink did not start a run")
        path = self._home / "app"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(1)
            server.settimeout(POLL)
            arguments = ["--runtime-api-address", self._address, "--root-certificates", str(self._tls.ca)]
            arguments += [SECRET_FILE, str(self._secret_file)]
            # The SuperExec starts the command flwr-serverapp, which may not be on the path of this process.
            commands = [
                os.path.realpath(file.locate()) for file in files("flwr") or () if file.stem == "flwr-serverapp"
            ]
            places = os.pathsep.join([*map(os.path.dirname, commands), os.environ.get("PATH", os.defpath)])
            self._start_child("SuperExec", "flower-superexec", arguments, PATH=places, **{SOCKET: str(path)})
            give_up = time.monotonic() + READY_WITHIN
            while self._app is None:
                self._check_children()
                if time.monotonic() > give_up:
                    raise self._failure("the SuperLink does not start the run's ServerApp")
                with contextlib.suppress(TimeoutError):
                    self._app = Connection(server.accept()[0].detach())

    def call(self, name: str, blobs: Mapping[str, bytes] | None = None, **arguments: Any) -> Result:
        """Call the run's grid (:class:`fedcore_flower.server_app.GridCalls`) and return its result.

        :raises FedcoreError: a process of Flower has ended.
        """
        assert self._app is not None
        try:
            send_blobs(self._app, {HEAD: json.dumps([name, arguments]).encode(), **(blobs or {})})
            while not self._app.poll(POLL):
                self._check_children()
            answer = receive_blobs(self._app)
        except (EOFError, ConnectionError) as error:
            raise self._failure("the run's ServerApp has ended") from error
        return json.loads(answer.pop(HEAD)), answer

    def stop(self) -> None:
        """End the run and the processes."""
        if self._app is not None:
            self._app.close()
        for child in reversed(self._children.values()):
            child.stop()
        self._http.close()

    def _start_child(self, name: str, target: str, arguments: Sequence[str], **env: str) -> None:
        log = self._home / f"{name.lower()}.log"
        self._children[name] = Child(target, arguments, log=log, env={"FLWR_HOME": str(self._home), **env})

    def _check_children(self) -> None:
        """Raise a FedcoreError if a process has ended."""
        for name, child in self._children.items():
            if child.exit_code is not None:
                raise self._failure(f"the {name} ended with exit code {child.exit_code}")

    def _failure(self, problem: str) -> FedcoreError:
        logs = [f"the log of the {name} ends with:\n{child.tail()}" for name, child in self._children.items()]
        return FedcoreError("; ".join([problem, *logs]))

    def _control(self, method: str, request: Any, answer: Any) -> Any:
        """Send a request to the Control API, as the command ``flwr`` does, with the secret.

        :raises FedcoreError: it is refused.
        """
        headers = {"content-type": "application/protobuf", "accept": "application/protobuf", **self._secret}
        try:
            reply = self._http.post(f"/v1/control/{method}", content=request.SerializeToString(), headers=headers)
            return answer.FromString(reply.raise_for_status().content)
        except httpx.HTTPError as error:
            raise self._failure(f"the SuperLink refuses {method}: {error}") from error


def _check_free(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from error
