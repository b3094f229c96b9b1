"""The courier's link over Flower. It sends messages to nodes and receives their replies through the run's grid."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from flwr.common.constant import ErrorCode

from fedcore.engines import ClientFailure, FailureKind
from fedcore_flower.courier import LostMessage
from fedcore_flower.superlink import SuperLink
from fedcore_flower.wire import Blobs

ONLINE_FOR = 0.5
"""The seconds for which the list of connected nodes is used before it is asked for again."""

FAILURE_KINDS: dict[int, FailureKind] = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "raised",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "raised",
    ErrorCode.NODE_UNAVAILABLE: "unreachable",
    ErrorCode.INVALID_FAB: "rejected",
}
"""Flower's errors -> the kind of the client's failure. Others are ``worker_lost``."""

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
        self._one_by_one = False
        self._lent: dict[str, bytes] = {}  # what the ServerApp has: a round's payload is the same for all clients

    def online(self) -> Collection[int]:
        """Return the clients whose nodes are connected, as the SuperLink knows it."""
        if time.monotonic() - self._asked > ONLINE_FOR:
            nodes, _ = self._superlink.call("nodes")
            self._online = {client for client, node in enumerate(self._nodes) if node in nodes}
            self._asked = time.monotonic()
        return self._online

    def send(self, client: int, kind: str, blobs: Blobs, ttl: float) -> str | None:
        """Send a message to a client's node."""
        new = {name: blob for name, blob in blobs.items() if self._lent.get(name) is not blob}
        self._lent |= new
        node = self._nodes[client]
        ticket, _ = self._superlink.call("push", new, names=list(blobs), node=node, kind=kind, ttl=ttl)
        return str(ticket) if ticket else None

    def collect(self, tickets: Collection[str]) -> Iterator[tuple[str, Blobs | ClientFailure]]:
        """Return the replies that have arrived. A reply that Flower cannot decode is a failure of its client.

        If Flower cannot decode one of several replies, it loses the others. From then on each reply is asked for by
        itself, and the courier's probes find out which requests must be sent again.
        """
        for group in [[ticket] for ticket in tickets] if self._one_by_one else [list(tickets)]:
            replies, blobs = self._superlink.call("pull", messages=group)
            if isinstance(replies, str):
                self._one_by_one = True
                if len(group) == 1:
                    yield group[0], ClientFailure("rejected", f"sent a message that Flower cannot decode: {replies}")
                continue
            for ticket, error in replies:
                if error is None:
                    names = [name for name in blobs if name.startswith(f"{ticket} ")]
                    yield ticket, {name.removeprefix(f"{ticket} "): blobs[name] for name in names}
                else:
                    yield ticket, _failure(*error)


def _failure(code: int, reason: str) -> ClientFailure:
    failure = LostMessage if code in LOST else ClientFailure
    return failure(FAILURE_KINDS.get(code, "worker_lost"), f"Flower reports {reason!r} (code {code})")
