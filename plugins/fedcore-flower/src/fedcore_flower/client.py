"""What ``fedcore federate client`` does: a SuperNode, a resident process beside it, and messages between them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedcore import ConfigError, FedcoreError
from fedcore_flower.processes import PRIVATE, Child, require_flower, silence_flower
from fedcore_flower.trainer import receive_blobs, send_blobs

TRAINER = "fedcore_flower.trainer:main"
POLL = 0.1
LOST = b"the training process ended"
READY_WITHIN = 600.0
"""Seconds for the first import of torch and for reading the data."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Membership:
    """A client's place in a federation: whom it talks to, with which data, under which conditions.

    :param server: HOST:PORT. ``ca``, ``key`` files that ``fedcore federate keys`` made.
    :param data: a data set as ``--dataset`` names one; ``test_fraction``, ``seed`` how its hold-out is drawn.
    :param state: folder of this client's states, Flower's files and logs.
    :param allowed: methods that it takes part in; None: all that are installed.
    :param models: names of models that may read this machine's files.
    :param patience: seconds that a server may refuse the key; one that has just started may not know its clients yet.
    """

    server: str
    ca: Path
    key: Path
    data: str
    state: Path
    data_dir: Path | None = None
    test_fraction: float | None = None
    seed: int = 0
    allowed: Collection[str] | None = None
    models: Collection[str] = ()
    device: str = "auto"
    quiet: bool = False
    patience: float = 60.0


class Trainer:
    """The resident process; :meth:`keep` starts it again where it ended."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = json.dumps(options)
        self.description: dict[str, Any] = {}
        self._start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def ask(self, blobs: dict[str, bytes], meanwhile: Callable[[], None]) -> dict[str, bytes]:
        """Return its answer to a request; ``meanwhile`` is called every now and then.

        Its end is an answer, too, given before its successor is started: during the start the SuperNode would not be
        told that its task is being worked on.
        """
        try:
            send_blobs(self._connection, blobs)
            while not self._connection.poll(POLL):
                meanwhile()
            return receive_blobs(self._connection)
        except (EOFError, ConnectionError):
            self.stop()
            code = self._child.exit_code or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return {"lost": LOST + f" ({how})".encode()}

    def keep(self) -> None:
        """Start it again where it has ended."""
        if self._child.exit_code is not None:
            self.stop()
            self._start()

    def stop(self) -> None:
        """End it, in mid-epoch too."""
        self._connection.close()
        self._child.stop(at_once=True)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self._child = Child(
                TRAINER,
                [str(theirs.fileno()), self._options],
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self.description = _first_words(self._connection, self._child)


def join(membership: Membership, tell: Tell) -> None:
    """Take part in a federation until Ctrl-C.

    :raises FedcoreError: the data cannot be read, the server refuses us, or is not the one that it should be.
    """
    require_flower()
    home = _private(membership.state) / "flower"
    home.mkdir(mode=PRIVATE, exist_ok=True)
    silence_flower(home)
    with _alone(membership.state):
        trainer = Trainer(_trainer_options(membership))
        try:
            tell(_holds(membership, trainer.description))
            _serve(membership, home, trainer, tell)
        finally:
            trainer.stop()


def _serve(membership: Membership, home: Path, trainer: Trainer, tell: Tell) -> None:
    from fedcore_flower.node import Node

    node = Node(
        home,
        membership.server,
        membership.ca.resolve(),
        membership.key.resolve(),
        patience=membership.patience,
        tell=tell,
    )
    try:
        while True:
            node.keep()
            trainer.keep()
            work = node.take()
            if work is None:
                time.sleep(POLL)
                continue

            def meanwhile(work: Any = work) -> None:
                node.keep()
                work.beat()

            work.answer(trainer.ask(work.blobs, meanwhile) if work.blobs else {})
    finally:
        node.stop()


def _first_words(connection: Connection, child: Child) -> dict[str, Any]:
    """Wait until a new process has read its data; returns what it says of it.

    :raises FedcoreError: it cannot, and says why; or it ended.
    """
    if not connection.poll(READY_WITHIN):
        child.stop(at_once=True)
        raise FedcoreError(f"the data was not read within {READY_WITHIN:.0f} s")
    try:
        blobs = receive_blobs(connection)
    except EOFError:
        child.stop()
        raise FedcoreError(f"the training process ended with exit code {child.exit_code}; see above for why") from None
    if "broken" in blobs:
        child.stop()
        raise FedcoreError(blobs["broken"].decode())
    described: dict[str, Any] = json.loads(blobs["ready"])
    return described


def _trainer_options(membership: Membership) -> dict[str, Any]:
    return {
        "data": membership.data,
        "data_dir": str(membership.data_dir) if membership.data_dir else None,
        "test_fraction": membership.test_fraction,
        "seed": membership.seed,
        "state": str(membership.state.resolve()),
        "allowed": None if membership.allowed is None else sorted(membership.allowed),
        "models": sorted(membership.models),
        "device": membership.device,
        "quiet": membership.quiet,
    }


def _holds(membership: Membership, described: dict[str, Any]) -> str:
    return (
        f"{membership.data}: {described['train']} samples to train on, {described['test']} held out; going to "
        f"{membership.server}"
    )


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"--state {folder} cannot be made: {error.strerror or error}") from error
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep another client from using the same states.

    :raises ConfigError: one does.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--state {folder} is in use by another client; each client needs its own folder") from None
    else:
        yield
    finally:
        os.close(descriptor)
