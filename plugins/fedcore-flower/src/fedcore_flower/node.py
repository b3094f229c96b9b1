"""The SuperNode of a client: Flower's process that talks to the server, and the tasks that it passes to us.

It runs with ``--isolation process``: it starts nothing by itself and runs no code that the server ships. Its tasks are
taken over its Runtime API on the loopback interface, with a secret of this process.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedcore import FedcoreError
from fedcore_flower.processes import Child, free_port
from fedcore_flower.records import from_content, to_content

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
HEARTBEAT_EVERY = 8.0
"""Seconds; Flower gives a task up after 60 without."""

PAUSES = (0.5, 1.0, 2.0, 5.0)
"""Seconds before a SuperNode that ended is started again: the first time, the second, ... and all later ones."""

_TROUBLES = (httpx.HTTPError, RunNotRunningException, ValueError, RuntimeError, OSError)


class Work:
    """A message that a SuperNode handed over, and where its answer goes."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client = client
        try:
            # The app that comes with a task is neither installed nor looked at.
            self._message, self._context, _, _ = pull_task_input(client)
        except BaseException:
            client.close()
            raise
        self._beaten = time.monotonic()

    @property
    def blobs(self) -> dict[str, bytes]:
        """What the server sent; empty where it is no message of fedcore's."""
        return from_content(self._message.content) if self._message.has_content() else {}

    def beat(self) -> None:
        """Let the SuperNode know that its task is being worked on; does nothing most of the times."""
        if time.monotonic() - self._beaten > HEARTBEAT_EVERY:
            self._beaten = time.monotonic()
            with contextlib.suppress(*_TROUBLES):
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def answer(self, blobs: dict[str, bytes]) -> None:
        """Hand the answer over; where the SuperNode is gone, the server will ask again."""
        if blobs:
            reply = Message(to_content(blobs), reply_to=self._message)
        else:
            error = Error(ErrorCode.INVALID_FAB, "this client takes part in runs of fedcore only")
            reply = Message(error, reply_to=self._message)
        try:
            with contextlib.suppress(*_TROUBLES):
                push_message(self._client, reply, self._context)
                push_task_output(self._client, None, SubStatus.COMPLETED, "")
        finally:
            self._client.close()


class Node:
    """Keeps a SuperNode running.

    :param home: this client's folder for Flower. ``server`` HOST:PORT.
    :param patience: seconds that a server may refuse the key.
    :param tell: called with status messages for the user.
    """

    def __init__(
        self, home: Path, server: str, ca: Path, key: Path, *, patience: float, tell: Callable[[str], None]
    ) -> None:
        self._home, self._tell, self._patience = home, tell, patience
        self._server, self._ca, self._key = server, ca, key
        self._log = home / "supernode.log"
        self._secret = secrets.token_bytes(32)
        secret_file = home / "secret"
        secret_file.unlink(missing_ok=True)
        secret_file.touch(mode=0o600)
        secret_file.write_bytes(self._secret)
        self._secret_file = secret_file
        self._child: Child | None = None
        self._client: RuntimeHttpClient | None = None
        self._address = ""
        self._ended, self._next = 0, 0.0
        self._refused_since: float | None = None
        self._started = 0.0
        self._connected = False

    @property
    def pid(self) -> int | None:
        """The SuperNode's process; None while there is none."""
        return self._child.pid if self._child else None

    def keep(self) -> None:
        """Start the SuperNode where there is none.

        :raises FedcoreError: the server does not know our key, or is not the one whose CA we have.
        """
        if self._child is None:
            if time.monotonic() >= self._next:
                self._start()
            return
        if self._child.exit_code is None:
            self._notice_connection()
            return
        self._why()
        self._say_goodbye()
        self._child.stop()
        self._child = None
        self._close_client()
        lived = time.monotonic() - self._started
        self._ended = 0 if self._connected and lived > 30 else self._ended + 1
        self._connected = False
        self._next = time.monotonic() + PAUSES[min(self._ended, len(PAUSES) - 1)]

    def take(self) -> Work | None:
        """Return the next message; None where there is none."""
        if self._client is None:
            return None
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            return Work(self._connect(RuntimeTokenHttpInterceptor(found.token))) if found.token else None
        except _TROUBLES:
            return None

    def stop(self) -> None:
        """End the SuperNode; it says goodbye to the server."""
        self._close_client()
        if self._child is not None:
            self._child.stop()
            self._child = None
        self._secret_file.unlink(missing_ok=True)

    def _start(self) -> None:
        self._log.write_bytes(b"")
        port = free_port()
        self._address = f"127.0.0.1:{port}"
        arguments = ["--superlink", self._server, "--root-certificates", str(self._ca)]
        arguments += ["--auth-supernode-private-key", str(self._key)]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(self._secret_file)]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        self._child = Child(
            "fedcore_flower.supernode_app:main",
            arguments,
            log=self._log,
            env={"FLWR_HOME": str(self._home)},
            at_death=signal.SIGTERM,  # it takes its leave of the server, which then need not wait for it
        )
        self._started = time.monotonic()
        auth = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods={ACQUIRE})
        self._client = self._connect(auth)

    def _connect(self, interceptor: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self._address,
            True,
            None,
            [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor],
        )

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _notice_connection(self) -> None:
        if not self._connected and "SuperNode ID" in self._words():
            self._connected, self._refused_since, self._ended = True, None, 0
            self._tell(f"connected to {self._server}")

    def _say_goodbye(self) -> None:
        """Take leave of the server in the place of a SuperNode that was killed: it lets no second one in before."""
        known = re.findall(r"SuperNode ID: (\d+)", self._words())
        if not known or "terminated gracefully" in self._words():
            return
        private = load_ssh_private_key(self._key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)  # seen to before anything began
        auth = NodeAuthHttpInterceptor(private, private.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        with contextlib.suppress(*_TROUBLES):
            ca = self._ca.read_bytes()
            with FleetHttpClient.from_server_address(self._server, False, ca, [version, auth]) as fleet:
                fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(known[-1])))

    def _words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _why(self) -> None:
        """Say why a SuperNode ended; raise where another one would end the same way."""
        assert self._child is not None
        lower = self._words().lower()
        if "certificate_verify_failed" in lower or "certificate verify failed" in lower:
            raise FedcoreError(
                f"the server at {self._server} shows a certificate that the CA of --ca did not sign for this address. "
                "Compare ca.crt with the server's, and the address with the hosts that the certificate was made for"
            )
        if "wrong_version_number" in lower or "record layer failure" in lower:
            raise FedcoreError(f"what answers at {self._server} does not speak TLS; a federation's server does")
        if "failed to activate supernode" in lower or "[code: 2004]" in lower:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > self._patience:
                raise FedcoreError(
                    f"the server at {self._server} does not know the key of --key; give its operator the .pub file"
                )
            return
        if "address already in use" in lower:
            return  # the port was taken in between; another one is tried
        if self._connected:
            self._tell("the connection to the server has ended; trying again")
        elif self._child.exit_code not in (0, None) and self._ended == len(PAUSES):
            self._tell(f"the SuperNode ends again and again; it says:\n{self._child.tail()}")
