"""A client's training process. It holds the data, the model and the client's states, and answers the server's requests.

The process that started it passes the messages over a pair of sockets.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from fedcore_flower.conditions import TrainerOptions
from fedcore_flower.processes import receive_blobs, send_blobs


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
    from fedcore.tools import output, process
    from fedcore_flower.handler import RequestHandler
    from fedcore_flower.own_data import OwnData

    with process.one_thread():
        try:
            data_dir = Path(options.data_dir) if options.data_dir else None
            own = OwnData.load(options.data, data_dir, options.test_fraction, options.seed)
        except FedcoreError as error:
            send_blobs(connection, {"broken": str(error).encode()})
            return
        handler = RequestHandler(own, options, (lambda message: None) if options.quiet else output.note)
        send_blobs(connection, {"ready": json.dumps(own.describe()).encode()})
        while True:
            send_blobs(connection, handler.answer(receive_blobs(connection)))
