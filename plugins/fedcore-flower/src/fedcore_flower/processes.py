"""Child processes that leave nothing behind: started, watched, stopped, with their output in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from fedcore.base.process import command, environment

PRIVATE = 0o700
FLOWER = "1.42"
"""The version of Flower whose internal interfaces this package uses."""

_TAIL = 20
_STOPPING = 8.0

SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower reports its use and asks for updates unless it is told not to, in each process."""


class Child:
    """A process of ours that dies with this one.

    :param target: ``module:function`` that it runs, with ``arguments`` as its command line.
    :param log: file that takes its output; None is this process's own stderr.
    :param at_death: the signal that it gets when this process dies.
    :param pass_fds: descriptors that it inherits.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str] = (),
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        at_death: signal.Signals = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        line = command("fedcore_flower.child", str(os.getpid()), str(int(at_death)), target)
        with _output(log) as stream:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [*line, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # Ctrl-C in the terminal is this process's business
                env=environment(**SILENT, **(env or {})),
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, minus the signal that ended it; None while it lives."""
        return self._process.poll()

    def tail(self) -> str:
        """Return the last lines that it wrote."""
        if self.log is None or not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL:])

    def stop(self, *, at_once: bool = False) -> None:
        """End it: asked first, then made to; idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill() if at_once else self._process.terminate()
        try:
            self._process.wait(timeout=_STOPPING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def silence_flower(home: Path) -> None:
    """Set this process's environment before Flower is imported: nothing is reported, nothing goes to the user's home.

    :param home: Flower's folder.
    """
    import logging

    os.environ.update(SILENT, FLWR_HOME=str(home))
    for name in ("NO_PROXY", "no_proxy"):  # what is on this machine is not reached through a proxy
        known = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", "::1"]))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def require_flower() -> None:
    """Refuse to begin without Flower, or with another minor version than this package goes with.

    :raises ConfigError: what is installed, and what to install.
    """
    from importlib.metadata import PackageNotFoundError, version

    from fedcore import ConfigError

    try:
        found = version("flwr")
    except PackageNotFoundError:
        found = ""
    if not found.startswith(f"{FLOWER}."):
        have = f"flwr {found} is installed" if found else "Flower is not installed here"
        raise ConfigError(
            f"{have}; fedcore federate needs version {FLOWER}: pip install 'flwr~={FLOWER}.0', in an environment "
            "without packages that need newer versions of protobuf, typer or rich"
        )


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes] | None]:
    if log is None:
        yield None
        return
    with log.open("ab") as stream:
        log.chmod(0o600)
        yield stream
