"""Requests to clients and their answers, whatever is lost on the way.

A node delivers at least once and in order, one message at a time. So an answered later message says that an earlier
one without an answer is lost: every now and then a small one, a probe, is sent behind a request that takes long. The
client answers a request that it has answered before with the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedcore import Tensors
from fedcore.engines import FailureKind
from fedcore_flower.wire import HEAD, Blobs, WireError, pack, unpack

LOST = "lost"
"""In place of an answer: the process that should have answered has ended; the blob says how."""

MOST_SENT = 6
"""How often a request is sent, before what becomes of it is a failure."""

FIRST_POLL, LONGEST_POLL = 0.05, 0.25


@dataclass(frozen=True)
class Trouble:
    """In place of an answer: what happened to it.

    :param again: it was lost on the way, so that the request is sent again.
    """

    kind: FailureKind
    message: str
    again: bool = False


class Link(Protocol):
    """Carries blobs to clients and back; clients are numbers here."""

    def online(self) -> Collection[int]:
        """Return the clients that are connected."""

    def send(self, client: int, kind: str, blobs: Blobs, ttl: float) -> str | None:
        """Send a message; returns the ticket of its reply, None where it cannot be sent.

        :param kind: ``train``, ``evaluate`` or ``query``, for the SuperLink's log.
        """

    def collect(self, tickets: Collection[str]) -> Iterable[tuple[str, Blobs | Trouble]]:
        """Return the replies that have arrived, each once.

        :raises FedcoreError: there is no SuperLink any more.
        """


@dataclass(eq=False)
class Errand:
    """A request in progress.

    :param parts: what the client may ask for beside the head, by name.
    :param attach: names of parts that go with it at once.
    :param note: the caller's own.
    """

    client: int
    kind: str
    head: bytes
    parts: Mapping[str, bytes] = field(default_factory=dict)
    attach: Collection[str] = ()
    note: Any = None
    began: float = 0.0
    sent: int = 0
    asked: float = 0.0
    tickets: set[str] = field(default_factory=set)
    probe: str | None = None
    doubtful: bool = False
    away_since: float | None = None


Answer = tuple[str, Tensors, dict[str, Any]]


class Courier:
    """Carries errands, one per client at a time.

    :param timeout: seconds until a request without an answer is given up.
    :param probe_every: seconds between looks at a node that is quiet.
    :param grace: seconds that a client whose connection broke has to come back; its request is then sent again.
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
        self._errands: dict[int, Errand] = {}
        self._poll = FIRST_POLL

    @property
    def busy(self) -> Collection[int]:
        """The clients that have an errand."""
        return self._errands.keys()

    def send(self, errand: Errand) -> Trouble | None:
        """Begin an errand; returns what is in its way.

        :raises FedcoreError: there is no SuperLink any more.
        """
        assert errand.client not in self._errands
        if errand.client not in self.link.online():
            return Trouble("unreachable", "it is not connected")
        errand.began = self._clock()
        if not self._dispatch(errand, errand.attach):
            return Trouble("unreachable", "the SuperLink does not take messages for it")
        self._errands[errand.client] = errand
        self._poll = FIRST_POLL
        return None

    def collect(self) -> list[tuple[Errand, Answer | Trouble]]:
        """Wait a moment, and return what has come to its end."""
        if not self._errands:
            return []
        self._sleep(self._poll)
        finished = self._take()
        doubtful = [errand for errand in self._errands.values() if errand.doubtful]
        if doubtful:  # an answer may have come with the probe's, behind this look's back
            finished += self._take()
        for errand in doubtful:
            if errand.client in self._errands and errand.doubtful:
                finished += self._again(errand, "its node has lost it", errand.parts)
        now = self._clock()
        for errand in [errand for errand in self._errands.values() if errand.away_since is not None]:
            finished += self._still_away(errand, now)
        for errand in list(self._errands.values()):
            if now - errand.began > self._timeout:
                del self._errands[errand.client]
                finished.append((errand, Trouble("timeout", f"no answer within {self._timeout:.0f} s")))
            elif errand.tickets and errand.probe is None and now - errand.asked > self._probe_every:
                errand.probe = self.link.send(errand.client, "query", {HEAD: pack("probe")}, self._timeout)
                errand.asked = now
        self._poll = FIRST_POLL if finished else min(LONGEST_POLL, self._poll * 1.2)
        return finished

    def _take(self) -> list[tuple[Errand, Answer | Trouble]]:
        owners = {ticket: errand for errand in self._errands.values() for ticket in errand.tickets}
        probes = {errand.probe: errand for errand in self._errands.values() if errand.probe is not None}
        finished: list[tuple[Errand, Answer | Trouble]] = []
        replies = list(self.link.collect([*owners, *probes]))
        for ticket, reply in replies:
            errand = owners.get(ticket)
            if errand is None or self._errands.get(errand.client) is not errand:
                continue  # a probe's, or of a request that has had its answer
            errand.tickets.discard(ticket)
            finished += self._replied(errand, reply)
        for ticket, reply in replies:
            if ticket in probes:
                probes[ticket].probe = None
                probes[ticket].doubtful = not isinstance(reply, Trouble)
        return finished

    def _replied(self, errand: Errand, reply: Blobs | Trouble) -> list[tuple[Errand, Answer | Trouble]]:
        if isinstance(reply, Trouble):
            if errand.tickets:
                return []  # it was sent again since
            if reply.again:
                return self._again(errand, reply.message, errand.parts)
            if reply.kind == "unreachable" and self._grace:
                errand.away_since = self._clock()
                return []
            return self._end(errand, reply)
        if LOST in reply and HEAD not in reply:
            return self._end(errand, Trouble("worker_lost", reply[LOST].decode(errors="replace")[:200]))
        try:
            answer = unpack(reply)
            if answer[0] == "need":
                names = [name for name in answer[2].get("names", ()) if name in errand.parts]
                if not names:
                    raise WireError("it asks for what there is not")
                return self._again(errand, "it asks for more each time", names)
        except (WireError, TypeError) as error:
            return self._end(errand, Trouble("rejected", f"sent {error}"))
        return self._end(errand, answer)

    def _still_away(self, errand: Errand, now: float) -> list[tuple[Errand, Answer | Trouble]]:
        if errand.client in self.link.online():
            errand.away_since = None
            return self._again(errand, "its connection breaks each time", errand.parts)
        if now - (errand.away_since or now) <= self._grace:
            return []
        return self._end(errand, Trouble("unreachable", f"its connection broke, for more than {self._grace:.0f} s"))

    def _again(self, errand: Errand, why: str, attach: Iterable[str]) -> list[tuple[Errand, Answer | Trouble]]:
        errand.doubtful = False
        if errand.sent >= MOST_SENT:
            return self._end(errand, Trouble("worker_lost", f"asked {errand.sent} times without an answer: {why}"))
        if not self._dispatch(errand, attach):
            return self._end(errand, Trouble("unreachable", "it is not connected any more"))
        return []

    def _dispatch(self, errand: Errand, attach: Iterable[str]) -> bool:
        blobs = {HEAD: errand.head, **{name: errand.parts[name] for name in attach}}
        ticket = self.link.send(errand.client, errand.kind, blobs, self._timeout)
        if ticket is None:
            return False
        errand.tickets.add(ticket)
        errand.sent += 1
        errand.asked = self._clock()
        return True

    def _end(self, errand: Errand, result: Answer | Trouble) -> list[tuple[Errand, Answer | Trouble]]:
        del self._errands[errand.client]
        return [(errand, result)]
