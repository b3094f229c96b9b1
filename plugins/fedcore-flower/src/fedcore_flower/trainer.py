"""A client's training process. It holds the data, the model and the client's states, and answers the server's requests.

The process that started it passes the messages over a pair of sockets.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass(frozen=True)
class TrainerOptions:
    """A client's data and the conditions under which it takes part. They go to the training process as JSON."""

    data: str
    """The data set, as ``--dataset`` names one."""
    state: str
    """The folder of the client's states, Flower's files and logs."""
    data_dir: str | None = None
    """The folder of named data sets."""
    test_fraction: float | None = None
    """The part of the training samples to hold out. None holds out the data set's own test samples."""
    seed: int = 0
    """The seed by which held-out samples are drawn."""
    allowed: list[str] | None = None
    """The methods that the client takes part in; None for all that are installed."""
    models: list[str] | None = None
    """The models that may read files of this machine."""
    device: str = "auto"
    quiet: bool = False
    """Whether to print nothing."""


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


def main() -> None:
    """Answer requests until the client's process ends. The arguments are a file descriptor and the options as JSON."""
    connection, options = Connection(int(sys.argv[1])), TrainerOptions(**json.loads(sys.argv[2]))
    try:
        _serve(connection, options)
    except (EOFError, ConnectionError):
        pass
    except KeyboardInterrupt:
        sys.exit(130)


def _serve(connection: Connection, options: TrainerOptions) -> None:
    from fedcore import FedcoreError
    from fedcore.base import output
    from fedcore.base.process import one_thread
    from fedcore_flower.handler import RequestHandler
    from fedcore_flower.own_data import OwnData

    with one_thread():
        try:
            data_dir = Path(options.data_dir) if options.data_dir else None
            own = OwnData.load(options.data, data_dir, options.test_fraction, options.seed)
        except FedcoreError as error:
            send_blobs(connection, {"broken": str(error).encode()})
            return
        handler = RequestHandler(
            own,
            Path(options.state),
            allowed=options.allowed,
            models=options.models or (),
            device=options.device,
            tell=(lambda message: None) if options.quiet else output.note,
        )
        send_blobs(connection, {"ready": json.dumps(own.describe()).encode()})
        while True:
            send_blobs(connection, handler.answer(receive_blobs(connection)))
