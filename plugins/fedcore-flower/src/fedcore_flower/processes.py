"""The child processes of the server and of a client: they end with their parent, and exchange blobs with it.

And the environment and the versions of Flower.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from fedcore.tools import process

PRIVATE = 0o700
"""The mode of a folder for its owner only."""

FLOWER = ((1, 40), (1, 43))
"""The versions of Flower that this package is tested with: from the first, below the second."""

_TAIL_LINES = 20
_STOP_WITHIN = 8.0

SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""With this environment a process of Flower sends no telemetry, asks for no updates and installs nothing."""


class Child:
    """A process that ends when this process ends.

    :param target: the function that it runs, as ``module:function``, or the name of an installed command.
    :param arguments: its command line.
    :param log: the file for its output; None for this process's stderr.
    :param at_parent_end: the signal that it gets when this process ends.
    :param pass_fds: the file descriptors that it inherits.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str] = (),
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        at_parent_end: signal.Signals = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._log = log
        line = process.python_command("fedcore_flower.child", str(os.getpid()), str(int(at_parent_end)), target)
        if log is not None:
            log.touch(mode=0o600)
        with contextlib.nullcontext() if log is None else log.open("ab") as stream:
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                [*line, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # Ctrl-C in the terminal goes to this process only
                env=process.environment(**SILENT, **(env or {})),
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; if a signal ended the process, minus its number. None while the process runs."""
        return self._process.poll()

    def tail(self) -> str:
        """Return the last lines of the log."""
        assert self._log is not None
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def stop(self, *, at_once: bool = False) -> None:
        """End the process with SIGTERM, and after some seconds with SIGKILL; idempotent.

        :param at_once: end it with SIGKILL now.
        """
        if not at_once:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_WITHIN)
        self._process.kill()
        self._process.wait()


def send_blobs(connection: Connection, blobs: dict[str, bytes]) -> None:
    """Send one message."""
    connection.send_bytes(json.dumps(list(blobs)).encode())
    for blob in blobs.values():
        connection.send_bytes(blob)


def receive_blobs(connection: Connection) -> dict[str, bytes]:
    """Wait for one message.

    :raises EOFError: the other process has ended, maybe in the middle of the message.
    """
    try:
        names = json.loads(connection.recv_bytes())
        return {name: connection.recv_bytes() for name in names}
    except OSError as error:  # also a plain one, if a message ends too early
        raise EOFError(str(error)) from error


def silence_flower(home: Path) -> None:
    """Set this process's environment so that Flower reports nothing. Call it before Flower is imported.

    :param home: the folder for Flower's files, instead of one in the user's home.
    """
    import logging

    os.environ.update(SILENT, FLWR_HOME=str(home))
    for name in ("NO_PROXY", "no_proxy"):  # no proxy for connections to this machine
        known = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", "::1"]))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def require_flower() -> None:
    """Check that Flower is installed in a version that this package is tested with.

    :raises ConfigError: it is not installed, or in another version.
    """
    from importlib.metadata import PackageNotFoundError, version

    from fedcore import ConfigError

    try:
        installed = version("flwr")
    except PackageNotFoundError:
        installed = ""
    first, below = FLOWER
    if not installed or not first <= tuple(map(int, installed.split(".")[:2])) < below:
        problem = f"flwr {installed} is installed" if installed else "Flower is not installed"
        (major, minor), (_, end) = first, below
        raise ConfigError(
            f"{problem}; fedcore federate needs version {major}.{minor} to {major}.{end - 1}: pip install "
            f"'flwr>={major}.{minor},<{major}.{end}', in an environment without packages that need newer versions of "
            "protobuf, typer or rich"
        )


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
