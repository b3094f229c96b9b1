"""The ServerApp of a federation's run: it lends the run's grid to the server's process.

Flower starts it in a process of its own, which imports no torch. It answers one question after the other, each a call
of the grid. Questions and answers go over a socket in the private folder of the SuperLink.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedcore_flower.processes import receive_blobs, send_blobs
from fedcore_flower.records import from_content, to_content

SOCKET = "FEDCORE_FLOWER_SOCKET"
"""The environment variable with the path of the socket."""

HEAD = "question"
"""The blob with the call and its arguments, or with its result, as JSON. The others are a message's."""


def main(grid: Grid, context: Context) -> None:
    """Answer questions until the server's process closes the socket. Then the run is complete."""
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(os.environ[SOCKET])
        connection = Connection(ours.detach())
    calls = GridCalls(grid)
    with connection, contextlib.suppress(EOFError):
        while True:
            blobs = receive_blobs(connection)
            name, arguments = json.loads(blobs.pop(HEAD))
            result, attached = getattr(calls, name)(blobs, **arguments)
            send_blobs(connection, {HEAD: json.dumps(result).encode(), **attached})


app = ServerApp()
app.main()(main)

Result = tuple[Any, dict[str, bytes]]
"""What a call returns: something for JSON, and blobs."""


class GridCalls:
    """The calls of a grid that the server's process needs."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._lent: dict[str, bytes] = {}

    def nodes(self, blobs: dict[str, bytes]) -> Result:
        """Return the ids of the connected nodes."""
        return list(self._grid.get_node_ids()), {}

    def push(self, blobs: dict[str, bytes], names: Iterable[str], node: int, kind: str, ttl: float) -> Result:
        """Send blobs to a node. Return the message's id, or None if the SuperLink does not take it.

        :param blobs: the new ones.
        :param names: the names of all blobs of the message. One that is not new is the last one of its name.
        """
        self._lent |= blobs
        message = Message(to_content({name: self._lent[name] for name in names}), node, f"{kind}.fedcore", ttl=ttl)
        tickets = list(self._grid.push_messages([message]))
        return tickets[0] if tickets else None, {}

    def pull(self, blobs: dict[str, bytes], messages: Iterable[str]) -> Result:
        """Return the replies that have arrived: the id of each message, and None or the code and reason of an error.

        The blobs of a reply have its message's id before their names. A text instead of the list says why Flower cannot
        decode a reply.
        """
        try:
            replies = list(self._grid.pull_messages(messages))
        except httpx.HTTPError:
            raise
        except Exception as error:  # a node's message may raise any exception in Flower's decoders
            return f"{type(error).__name__}: {error}", {}
        heads: list[tuple[str, tuple[int, str | None] | None]] = []
        attached: dict[str, bytes] = {}
        for reply in replies:
            message = reply.metadata.reply_to_message_id
            heads.append((message, (reply.error.code, reply.error.reason) if reply.has_error() else None))
            blobs = from_content(reply.content) if reply.has_content() else {}
            attached |= {f"{message} {name}": blob for name, blob in blobs.items()}
        return heads, attached
