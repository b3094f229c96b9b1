"""Requests to clients and their answers. What is lost on the way is sent again.

A node delivers each message at least once, in their order and one at a time. If a later message has been answered, an
earlier message without an answer is therefore lost. To find out, the courier sends a small message, a probe, behind a
request that takes long. A client that receives a request again repeats its answer and does not compute it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedcore import Tensors
from fedcore.engines import ClientFailure, ClientTask
from fedcore_flower.wire import HEAD, Blobs, WireError, pack, unpack

PROCESS_ENDED = "lost"
"""The blob of an answer from a client whose training process ended. It says how the process ended."""

MAX_SENDS = 6
"""How often a request is sent until it fails."""

FIRST_POLL, LONGEST_POLL = 0.05, 0.25


@dataclass(frozen=True)
class LostMessage(ClientFailure):
    """A message or its reply was lost on the way, so the request is sent again."""


class Link(Protocol):
    """Carries messages to clients and their replies back. Clients are named by their numbers."""

    def online(self) -> Collection[int]:
        """Return the clients that are connected."""

    def send(self, client: int, kind: str, blobs: Blobs, ttl: float) -> str | None:
        """Send a message. Return a ticket for its reply, or None if the message cannot be sent.

        :param kind: ``train``, ``evaluate`` or ``query``, for the SuperLink's log.
        :param ttl: the seconds until the message expires.
        :raises FedcoreError: the SuperLink has ended.
        """

    def collect(self, tickets: Collection[str]) -> Iterable[tuple[str, Blobs | ClientFailure]]:
        """Return the replies that have arrived, each once.

        :raises FedcoreError: the SuperLink has ended.
        """


@dataclass(eq=False)
class Request:
    """A request to a client, and how far the courier has come with it."""

    client: int
    kind: str
    """The kind of its messages, see :meth:`Link.send`."""
    head: bytes
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """The further blobs that the client may ask for, by name."""
    attach: Collection[str] = ()
    """The names of the parts that the first message contains."""
    task: ClientTask | None = None
    """The task of the request, for the caller."""
    began: float = 0.0
    """When the request was first sent."""
    sends: int = 0
    """How often the request was sent."""
    last_sent: float = 0.0
    """When the request or a probe was last sent."""
    tickets: set[str] = field(default_factory=set)
    """The tickets of the messages without a reply."""
    probe: str | None = None
    """The ticket of the probe without a reply."""
    overtaken: bool = False
    """Whether a probe has been answered before the request."""
    away_since: float | None = None
    """When the client's connection was found to be broken."""


Answer = tuple[str, Tensors, dict[str, Any]]
"""A decoded answer: its ``op``, its tensors and its header."""


class Courier:
    """Sends requests to clients, one at a time to each, and waits for the answers.

    :param timeout: the seconds until a request without an answer fails.
    :param probe_every: the seconds between probes of a client that does not answer.
    :param grace: the seconds in which a client whose connection broke may come back; its request is then sent again.
    """

    def __init__(
        self,
        link: Link,
        *,
        timeout: float,
        probe_every: float,
        grace: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.link = link
        self._timeout, self._probe_every, self._grace = timeout, probe_every, grace
        self._clock, self._sleep = clock, sleep
        self._requests: dict[int, Request] = {}
        self._finished: list[tuple[Request, Answer | ClientFailure]] = []
        self._poll = FIRST_POLL

    @property
    def busy(self) -> Collection[int]:
        """The clients that have a request."""
        return self._requests.keys()

    def send(self, request: Request) -> ClientFailure | None:
        """Send a request to a client that has none. Return why it cannot be sent, or None.

        :raises FedcoreError: the SuperLink has ended.
        """
        if request.client not in self.link.online():
            return ClientFailure("unreachable", "it is not connected")
        request.began = self._clock()
        if not self._send(request, request.attach):
            return ClientFailure("unreachable", "the SuperLink does not take messages for it")
        self._requests[request.client] = request
        self._poll = FIRST_POLL
        return None

    def collect(self) -> list[tuple[Request, Answer | ClientFailure]]:
        """Wait a moment. Return the requests that ended, each with its answer or its failure.

        :raises FedcoreError: the SuperLink has ended.
        """
        if not self._requests:
            return []
        self._sleep(self._poll)
        self._receive()
        overtaken = [request for request in self._requests.values() if request.overtaken]
        if overtaken:  # the answer may have arrived after this look, and before the probe's
            self._receive()
        for request in overtaken:
            if request.client in self._requests and request.overtaken:
                self._send_again(request, "its node has lost it", request.parts)
        now = self._clock()
        for request in list(self._requests.values()):
            if request.away_since is not None:
                self._look_for(request, now - request.away_since)
        for request in list(self._requests.values()):
            if now - request.began > self._timeout:
                self._end(request, ClientFailure("timeout", f"no answer within {self._timeout:.0f} s"))
            elif request.tickets and request.probe is None and now - request.last_sent > self._probe_every:
                request.probe = self.link.send(request.client, "query", {HEAD: pack("probe")}, self._timeout)
                request.last_sent = now
        finished, self._finished = self._finished, []
        self._poll = FIRST_POLL if finished else min(LONGEST_POLL, self._poll * 1.2)
        return finished

    def _receive(self) -> None:
        """Handle the replies that have arrived."""
        owners = {ticket: request for request in self._requests.values() for ticket in request.tickets}
        probes = {request.probe: request for request in self._requests.values() if request.probe is not None}
        replies = list(self.link.collect([*owners, *probes]))
        for ticket, reply in replies:
            request = owners.get(ticket)
            if request is None or self._requests.get(request.client) is not request:
                continue  # the reply to a probe, or a second reply to a request
            request.tickets.discard(ticket)
            self._handle_reply(request, reply)
        for ticket, reply in replies:
            if ticket in probes:
                probes[ticket].probe = None
                probes[ticket].overtaken = not isinstance(reply, ClientFailure)

    def _handle_reply(self, request: Request, reply: Blobs | ClientFailure) -> None:
        if isinstance(reply, ClientFailure):
            if request.tickets:
                return  # it has been sent again since
            if isinstance(reply, LostMessage):
                self._send_again(request, reply.message, request.parts)
            elif reply.kind == "unreachable" and self._grace:
                request.away_since = self._clock()
            else:
                self._end(request, reply)
            return
        if PROCESS_ENDED in reply and HEAD not in reply:
            how = reply[PROCESS_ENDED].decode(errors="replace")[:200]
            self._end(request, ClientFailure("worker_lost", how))
            return
        try:
            answer = unpack(reply)
            needed = None
            if answer[0] == "need":
                needed = [name for name in answer[2].get("names", ()) if name in request.parts]
                if not needed:
                    raise WireError("a request for parts that do not exist")
        except (WireError, TypeError) as error:
            self._end(request, ClientFailure("rejected", f"sent {error}"))
            return
        if needed:
            self._send_again(request, "it asks for more each time", needed)
        else:
            self._end(request, answer)

    def _look_for(self, request: Request, away: float) -> None:
        """Send the request again if its client is back, or end it if its client has been away for too long."""
        if request.client in self.link.online():
            request.away_since = None
            self._send_again(request, "its connection breaks each time", request.parts)
        elif away > self._grace:
            message = f"its connection broke, for more than {self._grace:.0f} s"
            self._end(request, ClientFailure("unreachable", message))

    def _send_again(self, request: Request, why: str, attach: Iterable[str]) -> None:
        request.overtaken = False
        if request.sends >= MAX_SENDS:
            message = f"asked {request.sends} times without an answer: {why}"
            self._end(request, ClientFailure("worker_lost", message))
        elif not self._send(request, attach):
            self._end(request, ClientFailure("unreachable", "it is no longer connected"))

    def _send(self, request: Request, attach: Iterable[str]) -> bool:
        blobs = {HEAD: request.head, **{name: request.parts[name] for name in attach}}
        ticket = self.link.send(request.client, request.kind, blobs, self._timeout)
        if ticket is None:
            return False
        request.tickets.add(ticket)
        request.sends += 1
        request.last_sent = self._clock()
        return True

    def _end(self, request: Request, result: Answer | ClientFailure) -> None:
        del self._requests[request.client]
        self._finished.append((request, result))
