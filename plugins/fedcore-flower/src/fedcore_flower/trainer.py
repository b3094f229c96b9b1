"""The resident process beside a SuperNode: holds the data, the model and the client's states, and trains.

It talks to the process that started it over a socket pair that has no name; a frame is blobs by name.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def send_blobs(connection: Connection, blobs: dict[str, bytes]) -> None:
    """Send one frame."""
    connection.send_bytes(json.dumps(list(blobs)).encode())
    for blob in blobs.values():
        connection.send_bytes(blob)


def receive_blobs(connection: Connection) -> dict[str, bytes]:
    """Wait for one frame.

    :raises EOFError: the other end is gone.
    """
    try:
        names = json.loads(connection.recv_bytes())
        return {name: connection.recv_bytes() for name in names}
    except ConnectionError as error:
        raise EOFError(str(error)) from error


def main() -> None:
    """Serve the client's process until it hangs up: ``FD OPTIONS``, the second as JSON."""
    connection, options = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    try:
        _serve(connection, options)
    except (EOFError, ConnectionError):
        pass
    except KeyboardInterrupt:
        sys.exit(130)


def _serve(connection: Connection, options: dict[str, Any]) -> None:
    import torch
    from threadpoolctl import threadpool_limits

    from fedcore import FedcoreError
    from fedcore.base import output
    from fedcore_flower.own_data import OwnData
    from fedcore_flower.resident import Resident

    torch.set_num_threads(1)
    with threadpool_limits(1):
        try:
            data_dir = options["data_dir"]
            own = OwnData.load(
                options["data"], Path(data_dir) if data_dir else None, options["test_fraction"], options["seed"]
            )
        except FedcoreError as error:
            send_blobs(connection, {"broken": str(error).encode()})
            return
        resident = Resident(
            own,
            Path(options["state"]),
            allowed=options["allowed"],
            models=options["models"],
            device=options["device"],
            tell=(lambda message: None) if options["quiet"] else output.note,
        )
        send_blobs(connection, {"ready": json.dumps(own.describe()).encode()})
        while True:
            send_blobs(connection, resident.answer(receive_blobs(connection)))
