"""``fedcore federate client``: starts a SuperNode and a training process, and passes messages between them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedcore import ConfigError, FedcoreError
from fedcore_flower.conditions import TrainerOptions
from fedcore_flower.processes import PRIVATE, Child, receive_blobs, require_flower, send_blobs, silence_flower

TRAINER = "fedcore_flower.trainer:main"
POLL = 0.1
READY_WITHIN = 600.0
"""The seconds in which a training process must have imported torch and read its data."""


class Trainer:
    """The training process."""

    def __init__(self, options: TrainerOptions) -> None:
        self._options = json.dumps(asdict(options))
        self.description: dict[str, Any] = {}
        """What the process says of its data (:meth:`fedcore_flower.own_data.OwnData.describe`)."""
        self._start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    def ask(self, blobs: dict[str, bytes], meanwhile: Callable[[], None]) -> dict[str, bytes]:
        """Return the answer to a request. Call ``meanwhile`` again and again until it arrives.

        If the process ends, the answer says so. It is returned before :meth:`keep_running` starts the next process,
        because during the start nobody would tell the SuperNode that its task is in progress.
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
            return {"lost": f"the training process ended ({how})".encode()}

    def keep_running(self) -> None:
        """Start the process again if it has ended."""
        if self._child.exit_code is not None:
            self.stop()
            self._start()

    def stop(self) -> None:
        """End the process at once, even during training."""
        self._connection.close()
        self._child.stop(at_once=True)

    def _start(self) -> None:
        """Start the process and wait until it has read its data.

        :raises FedcoreError: it cannot read its data, or it ended.
        """
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self._child = Child(
                TRAINER,
                [str(theirs.fileno()), self._options],
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        if not self._connection.poll(READY_WITHIN):
            self.stop()
            raise FedcoreError(f"the data was not read within {READY_WITHIN:.0f} s")
        try:
            blobs = receive_blobs(self._connection)
        except EOFError:
            self._child.stop()
            code = self._child.exit_code
            raise FedcoreError(f"the training process ended with exit code {code}; see above for why") from None
        if "broken" in blobs:
            self.stop()
            raise FedcoreError(blobs["broken"].decode())
        self.description = json.loads(blobs["ready"])


def join(
    server: str, ca: Path, key: Path, options: TrainerOptions, *, patience: float, tell: Callable[[str], None]
) -> None:
    """Take part in a federation until Ctrl-C.

    :param server: HOST:PORT of the server.
    :param ca: the CA's certificate, a file of ``fedcore federate keys``.
    :param key: the client's private key, a file of ``fedcore federate keys``.
    :param patience: the seconds in which a server may refuse the key. A server that just started may not have
        registered its clients yet.
    :param tell: called with status messages for the user.
    :raises FedcoreError: the data cannot be read, the server refuses the key, or it has no certificate of the CA.
    """
    require_flower()
    state = Path(options.state)
    home = state / "flower"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        home.mkdir(exist_ok=True, mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"--state {state} cannot be made: {error.strerror or error}") from error
    silence_flower(home)
    from fedcore_flower.node import Node

    with _locked(state):
        trainer = Trainer(options)
        try:
            held = trainer.description
            tell(
                f"{options.data}: {held['train']} samples to train on, {held['test']} held out; connecting to {server}"
            )
            _serve(Node(home, server, ca.resolve(), key.resolve(), patience=patience, tell=tell), trainer)
        finally:
            trainer.stop()


def _serve(node: Any, trainer: Trainer) -> None:
    try:
        while True:
            node.keep_running()
            trainer.keep_running()
            task = node.next_task()
            if task is None:
                time.sleep(POLL)
                continue

            def meanwhile(task: Any = task) -> None:
                node.keep_running()
                task.heartbeat()

            task.answer(trainer.ask(task.blobs, meanwhile) if task.blobs else {})
    finally:
        node.stop()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder of states in the block.

    :raises ConfigError: another client has locked it.
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
