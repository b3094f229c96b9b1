"""One round under way on the server: what it works with, what it shares with clients, what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from fedcore.base.tensors import bytes_of
from fedcore.base.types import Tensors
from fedcore.client.messages import FailureKind
from fedcore.server.federation import Federation
from fedcore.server.ledger import Ledger
from fedcore.server.state import ServerState
from fedcore.server.system import SimulatedOutcome
from fedcore.storage.state import States, flatten

Notify = Callable[[str, Mapping[str, Any]], None]
IGNORED = ("repeated", "unasked")
MESSAGE_LENGTH = 1000
Phase = Literal["select_clients", "begin_round", "round", "post_train"]


@dataclass
class Round:
    """The server's side of one round (or of post_train) while it is under way; nothing here is committed."""

    federation: Federation
    committed: ServerState
    model: Tensors
    states: States
    number: int
    phase: Phase = "round"
    cohort: list[int] = field(default_factory=list)
    simulated: dict[int, SimulatedOutcome] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    frozen: frozenset[str] = frozenset()
    failures: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[dict[str, Any]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    shared_keys: list[str] = field(default_factory=list)
    down: dict[str, int] = field(default_factory=dict)
    asked: int = 0

    @classmethod
    def open(cls, federation: Federation, committed: ServerState, number: int | None = None) -> Round:
        """Begin from what is committed.

        :param number: the round, from 0; default the next one to run.
        """
        number = committed.round if number is None else number
        return cls(federation, committed, dict(committed.model), States(committed.plugins), number)

    @cached_property
    def available(self) -> Sequence[int]:
        """The clients that can be selected, in ascending order."""
        return self.federation.simulator.available(self.number)

    @property
    def lr(self) -> float:
        """The local learning rate of the round."""
        return self.federation.config.lr * self.federation.config.lr_decay**self.number

    def share(self, key: str, broadcast: Mapping[str, Tensors]) -> str:
        """Send the model and broadcasts to the engine once, under a key of this round."""
        model = {name: self.model[name] for name in self.federation.setup.layout.shared}
        tensors = {f"model/{name}": tensor for name, tensor in model.items()}
        tensors.update({f"broadcast/{name}": tensor for name, tensor in flatten(broadcast)[0].items()})
        self.federation.engine.share(key, tensors, {"lr": self.lr})
        self.shared_keys.append(key)
        self.down = {"model": bytes_of(model)}
        self.down.update({plugin: bytes_of(sent) for plugin, sent in broadcast.items()})
        return key

    def reached(self, clients: Iterable[int]) -> Iterator[int]:
        """Yield those of some clients that a question reaches, and record the others once."""
        for client in clients:
            if self.phase == "post_train" or self.federation.simulator.reachable(self.number, client):
                yield client
            elif client not in self.simulated:  # the cohort's are recorded when they do not train
                self.fail(client, "unavailable", "could not be reached when the round began")

    def count_down(self) -> None:
        """Enter the shared payload into the ledger, for one client."""
        for sender, size in self.down.items():
            self.ledger.down(sender, size)

    def close(self) -> None:
        """Free what was shared."""
        for key in self.shared_keys:
            self.federation.engine.unshare(key)
        self.shared_keys.clear()

    def fail(self, client: int, kind: str, message: str) -> None:
        """Record a client that gave nothing usable; its own words are cut to a length for people."""
        self.failures.append(_entry(client, kind, message))

    def ignore(self, client: int, kind: str, message: str) -> None:
        """Record an outcome that changed nothing, whatever else the client gave."""
        self.ignored.append(_entry(client, kind, message))


def _entry(client: int, kind: str, message: str) -> dict[str, Any]:
    message = str(message)
    cut = f"{message[:MESSAGE_LENGTH]} ..." if len(message) > MESSAGE_LENGTH else message
    return {"client": client, "kind": kind if kind in get_args(FailureKind) + IGNORED else "rejected", "message": cut}
