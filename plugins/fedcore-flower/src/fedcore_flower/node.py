"""A client's SuperNode: the process of Flower that exchanges messages with the server.

It runs with ``--isolation process``: it starts no process of its own and runs no code from the server. This process
takes its tasks through its Runtime API on the loopback interface, with a secret of this process.
"""

from __future__ import annotations

import contextlib
import datetime
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
"""Seconds between heartbeats of a task. Flower gives a task up after 60 s without one."""

PAUSES = (0.5, 1.0, 2.0, 5.0)
"""Seconds until a SuperNode that ended is started again: the first time, the second time, and so on. The last pause
repeats."""

_UNREACHABLE = (httpx.HTTPError, RunNotRunningException, ValueError, RuntimeError, OSError)


class Task:
    """A message from the server that needs an answer. Flower calls this a task of the SuperNode."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client = client
        try:
            # The app of the task is neither installed nor read.
            self._message, self._context, _, _ = pull_task_input(client)
        except BaseException:
            client.close()
            raise
        self._last_heartbeat = time.monotonic()

    @property
    def blobs(self) -> dict[str, bytes]:
        """The message's blobs. Empty if it is not a message of fedcore."""
        return from_content(self._message.content) if self._message.has_content() else {}

    def heartbeat(self) -> None:
        """Tell the SuperNode that its task is in progress, if it is time to."""
        if time.monotonic() - self._last_heartbeat > HEARTBEAT_EVERY:
            self._last_heartbeat = time.monotonic()
            with contextlib.suppress(*_UNREACHABLE):
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def answer(self, blobs: dict[str, bytes]) -> None:
        """Give the answer to the SuperNode. If the SuperNode has ended, the server sends its request again.

        :param blobs: the answer; empty to refuse a message that is not of fedcore.
        """
        if blobs:
            reply = Message(to_content(blobs), reply_to=self._message)
        else:
            error = Error(ErrorCode.INVALID_FAB, "this client only takes part in runs of fedcore")
            reply = Message(error, reply_to=self._message)
        try:
            with contextlib.suppress(*_UNREACHABLE):
                push_message(self._client, reply, self._context)
                push_task_output(self._client, None, SubStatus.COMPLETED, "")
        finally:
            self._client.close()


class Node:
    """Keeps a SuperNode running.

    :param home: the folder for Flower's files of this client.
    :param server: HOST:PORT of the server.
    :param ca: the CA's certificate.
    :param key: the client's private key.
    :param patience: the seconds in which a server may refuse the key.
    :param tell: called with status messages for the user.
    """

    def __init__(
        self, home: Path, server: str, ca: Path, key: Path, *, patience: float, tell: Callable[[str], None]
    ) -> None:
        self._home, self._tell, self._patience = home, tell, patience
        self._server, self._ca, self._key = server, ca, key
        self._log = home / "supernode.log"
        self._secret = secrets.token_bytes(32)
        self._secret_file = home / "secret"
        self._secret_file.unlink(missing_ok=True)
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_bytes(self._secret)
        self._child: Child | None = None
        self._client: RuntimeHttpClient | None = None
        self._address = ""
        self._failed_starts, self._next_start, self._started = 0, 0.0, 0.0
        self._refused_since: float | None = None
        self._connected = False

    def keep_running(self) -> None:
        """Start the SuperNode if it does not run.

        :raises FedcoreError: the server does not know the client's key, the CA did not sign its certificate, the
            certificate has expired, or the clocks of both differ.
        """
        if self._child is None:
            if time.monotonic() >= self._next_start:
                self._start()
            return
        if self._child.exit_code is None:
            self._notice_connection()
            return
        self._explain_end(self._child)
        self._deactivate()
        self._close()
        lasted = time.monotonic() - self._started
        self._failed_starts = 0 if self._connected and lasted > 30 else self._failed_starts + 1
        self._connected = False
        self._next_start = time.monotonic() + PAUSES[min(self._failed_starts, len(PAUSES) - 1)]

    def next_task(self) -> Task | None:
        """Return the next message from the server, or None without one."""
        if self._client is None:
            return None
        try:
            answer = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            return Task(self._connect(RuntimeTokenHttpInterceptor(answer.token))) if answer.token else None
        except _UNREACHABLE:
            return None

    def stop(self) -> None:
        """End the SuperNode. It deactivates itself at the server."""
        self._close()
        self._secret_file.unlink(missing_ok=True)

    def _start(self) -> None:
        self._log.unlink(missing_ok=True)
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
            at_parent_end=signal.SIGTERM,  # so that it deactivates itself at the server
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

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _notice_connection(self) -> None:
        if not self._connected and "SuperNode ID" in self._log_text():
            self._connected, self._refused_since, self._failed_starts = True, None, 0
            self._tell(f"connected to {self._server}")

    def _deactivate(self) -> None:
        """Deactivate a SuperNode that was killed. Until then the server refuses another one with the same key."""
        ids = re.findall(r"SuperNode ID: (\d+)", self._log_text())
        if not ids or "terminated gracefully" in self._log_text():
            return
        private = load_ssh_private_key(self._key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)  # the command has checked it
        auth = NodeAuthHttpInterceptor(private, private.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        with contextlib.suppress(*_UNREACHABLE):
            ca = self._ca.read_bytes()
            with FleetHttpClient.from_server_address(self._server, False, ca, [version, auth]) as fleet:
                fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(ids[-1])))

    def _log_text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _explain_end(self, child: Child) -> None:
        """Tell the user why the SuperNode ended.

        :raises FedcoreError: another SuperNode would end for the same reason.
        """
        log = self._log_text().lower()
        clock = f"this machine's clock, which says {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        if "certificate has expired" in log:
            raise FedcoreError(
                f"the certificate of the server at {self._server} has expired; its operator makes new ones by fedcore "
                f"federate keys. Or compare {clock}"
            )
        if "certificate is not yet valid" in log:
            raise FedcoreError(f"the certificate of the server at {self._server} is not valid yet; compare {clock}")
        if "certificate_verify_failed" in log or "certificate verify failed" in log:
            raise FedcoreError(
                f"the server at {self._server} shows a certificate that the CA of --ca did not sign for this address. "
                "Compare ca.crt with the server's, and the address with the hosts that the certificate was made for"
            )
        if "wrong_version_number" in log or "record layer failure" in log:
            raise FedcoreError(f"the server at {self._server} does not use TLS; the server of a federation does")
        # A SuperNode ends itself without a word if the server answers 401: the times of both are far apart.
        late = "terminated gracefully" in log and "supernode id" not in log
        if late or "failed to activate supernode" in log or "[code: 2004]" in log:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > self._patience:
                unknown = "does not know the key of --key; give its operator the .pub file"
                why = (
                    f"refuses the time of this client's signatures; compare its clock with {clock}" if late else unknown
                )
                raise FedcoreError(f"the server at {self._server} {why}")
        elif self._connected:
            self._tell("the connection to the server has ended; trying again")
        elif child.exit_code != 0 and self._failed_starts == len(PAUSES):
            self._tell(f"the SuperNode ends again and again; its log ends with:\n{child.tail()}")
