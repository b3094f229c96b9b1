"""The courier's link over Flower. It sends messages to nodes and receives their replies through the run's grid."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from flwr.app import Array, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedcore.engines import ClientFailure, FailureKind
from fedcore_flower.courier import LostMessage
from fedcore_flower.records import INLINE, as_array, from_content, to_content
from fedcore_flower.superlink import MalformedReply, SuperLink
from fedcore_flower.wire import SHARED, Blobs

ONLINE_FOR = 0.5
"""The seconds for which the list of connected nodes is used before it is asked for again."""

KINDS: dict[int, FailureKind] = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "raised",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "raised",
    ErrorCode.NODE_UNAVAILABLE: "unreachable",
    ErrorCode.INVALID_FAB: "rejected",
}

LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED)
"""Flower's errors for a lost message or a lost reply. The client may have finished the task."""


class FlowerLink:
    """Sends messages to the clients' nodes. Flower identifies a node by its key, so no client can replace another.

    :param nodes: the node id of each client, in the order of their numbers.
    """

    def __init__(self, superlink: SuperLink, nodes: Sequence[int]) -> None:
        self._superlink, self._nodes = superlink, list(nodes)
        self._online: set[int] = set()
        self._asked = float("-inf")
        self._shared: tuple[bytes, Array] | None = None
        self._one_by_one = False

    def online(self) -> Collection[int]:
        """Return the clients whose nodes are connected, as the SuperLink knows it."""
        if time.monotonic() - self._asked > ONLINE_FOR:
            found = set(self._superlink.call(self._superlink.grid.get_node_ids))
            self._online = {client for client, node in enumerate(self._nodes) if node in found}
            self._asked = time.monotonic()
        return self._online

    def send(self, client: int, kind: str, blobs: Blobs, ttl: float) -> str | None:
        """Send a message to a client's node."""
        message = Message(self._content(blobs), self._nodes[client], f"{kind}.fedcore", ttl=ttl)
        (ticket,) = self._superlink.call(self._superlink.grid.push_messages, [message]) or [None]
        return ticket or None

    def collect(self, tickets: Collection[str]) -> Iterator[tuple[str, Blobs | ClientFailure]]:
        """Return the replies that have arrived. A reply that Flower cannot decode is a failure of its client.

        If Flower cannot decode one of several replies, it loses the others. From then on each reply is asked for by
        itself, and the courier's probes find out which requests must be sent again.
        """
        for group in [[ticket] for ticket in tickets] if self._one_by_one else [list(tickets)]:
            try:
                replies = self._superlink.call(self._superlink.grid.pull_messages, group)
            except MalformedReply as error:
                self._one_by_one = True
                if len(group) == 1:
                    yield group[0], ClientFailure("rejected", f"sent a message that Flower cannot decode: {error}")
                continue
            for reply in replies:
                yield reply.metadata.reply_to_message_id, _read(reply)

    def _content(self, blobs: Blobs) -> RecordDict:
        """Return the content of a message. A round's payload is the same for all clients and is converted once."""
        if len(blobs.get(SHARED, b"")) <= INLINE:
            return to_content(blobs)
        if self._shared is None or self._shared[0] is not blobs[SHARED]:
            self._shared = (blobs[SHARED], as_array(blobs[SHARED]))
        return to_content({name: blob for name, blob in blobs.items() if name != SHARED}, {SHARED: self._shared[1]})


def _read(reply: Any) -> Blobs | ClientFailure:
    if not reply.has_error():
        return from_content(reply.content)
    code = reply.error.code
    failure = LostMessage if code in LOST else ClientFailure
    return failure(KINDS.get(code, "worker_lost"), f"Flower reports {reply.error.reason!r} (code {code})")
