"""The courier's link over Flower: messages to nodes, and their replies, through the run's grid."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import Array, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedcore.engines import FailureKind
from fedcore_flower.courier import Trouble
from fedcore_flower.records import INLINE, as_array, from_content, to_content
from fedcore_flower.wire import SHARED, Blobs

ONLINE_FOR = 0.5
"""Seconds that a look at who is online is good for."""

KINDS: dict[int, FailureKind] = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "raised",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "raised",
    ErrorCode.NODE_UNAVAILABLE: "unreachable",
    ErrorCode.INVALID_FAB: "rejected",
}

LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED)
"""What Flower says where a message, or its reply, has not come through: the task itself may well be done."""


class Malformed(Exception):
    """What a node sent is no message."""


class GridOwner(Protocol):
    """What the link asks of the SuperLink (``fedcore_flower.superlink``)."""

    @property
    def grid(self) -> Any:
        """The run's grid."""

    def call(self, function: Any, *arguments: Any) -> Any:
        """Return what a call of the grid gives; raises where the SuperLink is gone.

        :raises Malformed: the SuperLink is there, but its answer is no message.
        """


class FlowerLink:
    """Clients are known by their nodes, which Flower knows by their keys: none can take another's place.

    :param nodes: node id of each client, in their order.
    """

    def __init__(self, owner: GridOwner, nodes: Sequence[int]) -> None:
        self._owner, self._nodes = owner, list(nodes)
        self._online: set[int] = set()
        self._looked = float("-inf")
        self._shared: tuple[bytes, Array] | None = None
        self._one_by_one = False

    def online(self) -> Collection[int]:
        """Return the clients whose nodes have sent a sign of life lately."""
        if time.monotonic() - self._looked > ONLINE_FOR:
            found = set(self._owner.call(self._owner.grid.get_node_ids))
            self._online = {client for client, node in enumerate(self._nodes) if node in found}
            self._looked = time.monotonic()
        return self._online

    def send(self, client: int, kind: str, blobs: Blobs, ttl: float) -> str | None:
        """Send a message to a client's node."""
        message = Message(self._content(blobs), self._nodes[client], f"{kind}.fedcore", ttl=ttl)
        (ticket,) = self._owner.call(self._owner.grid.push_messages, [message]) or [None]
        return ticket or None

    def collect(self, tickets: Collection[str]) -> Iterator[tuple[str, Blobs | Trouble]]:
        """Return the replies that the SuperLink has; one that cannot be read is its client's failure."""
        for some in [[ticket] for ticket in tickets] if self._one_by_one else [list(tickets)]:
            try:
                replies = self._owner.call(self._owner.grid.pull_messages, some)
            except Malformed as error:
                self._one_by_one = True  # the others' replies are asked for again, see the courier's probes
                if len(some) == 1:
                    yield some[0], Trouble("rejected", f"sent a message that Flower cannot read: {error}")
                continue
            for reply in replies:
                yield reply.metadata.reply_to_message_id, _read(reply)

    def _content(self, blobs: Blobs) -> RecordDict:
        """Return a message's content; a round's payload, the same for all clients, is cut up and hashed once."""
        if len(blobs.get(SHARED, b"")) <= INLINE:
            return to_content(blobs)
        if self._shared is None or self._shared[0] is not blobs[SHARED]:
            self._shared = (blobs[SHARED], as_array(blobs[SHARED]))
        return to_content({name: blob for name, blob in blobs.items() if name != SHARED}, {SHARED: self._shared[1]})


def _read(reply: Any) -> Mapping[str, bytes] | Trouble:
    if reply.has_error():
        code = reply.error.code
        words = f"Flower says {reply.error.reason!r} (code {code})"
        return Trouble(KINDS.get(code, "worker_lost"), words, again=code in LOST)
    return from_content(reply.content)
