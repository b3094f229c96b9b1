"""One round under way on the server: what it works with, what it shares with clients, what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from fedcore.boundary import Boundary
from fedcore.config import RunConfig
from fedcore.data import Dataset, Partition
from fedcore.engines.base import ClientFailure, ClientTask, Engine, FailureKind, Outcome
from fedcore.ledger import Ledger
from fedcore.problem import Problem
from fedcore.state import ClientStore, ServerState, States, flatten
from fedcore.system.simulator import Fate, Simulator
from fedcore.tensors import bytes_of
from fedcore.types import Tensors

Notify = Callable[[str, Mapping[str, Any]], None]
IGNORED = ("repeated", "unasked")
MESSAGE_LENGTH = 1000
Phase = Literal["select_clients", "begin_round", "round", "post_train"]


@dataclass(frozen=True)
class Federation:
    """What the server works with, all run long.

    :param store: where the clients keep their state.
    """

    problem: Problem
    dataset: Dataset
    partition: Partition
    engine: Engine
    store: ClientStore

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.problem.config

    @cached_property
    def boundary(self) -> Boundary:
        """Checks what clients send."""
        return Boundary(self.problem, self.partition, self.store)

    @cached_property
    def simulator(self) -> Simulator:
        """Draws who is available, lost, late and slow; without ``--system`` nobody is."""
        return Simulator(self.config, self.partition.train.sizes.numpy(), self.problem.breaks)


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
    fates: dict[int, Fate] = field(default_factory=dict)
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
        model = {name: self.model[name] for name in self.federation.problem.layout.shared}
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
            elif client not in self.fates:  # the cohort's are recorded when they do not train
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


def in_order(
    tasks: list[ClientTask],
    outcomes: Iterable[tuple[ClientTask, Outcome]],
    ignore: Callable[[int, str, str], None] = lambda client, kind, message: None,
) -> Iterator[tuple[ClientTask, Outcome]]:
    """Yield exactly one outcome of every task, in the order of the tasks: an early one waits for its turn.

    A second outcome of a task is dropped, and so is one of a task that nobody waits for; a task without any is
    a failure.

    :param ignore: told of what is dropped: client, kind and a message.
    """
    position = {task.id: index for index, task in enumerate(tasks)}
    waiting: dict[int, Outcome] = {}
    turn = 0
    for task, outcome in outcomes:
        index = position.get(task.id)
        if index is None:
            ignore(task.client, "unasked", f"an outcome of task {task.id!r}, which nobody waits for")
        elif index < turn or index in waiting:
            ignore(tasks[index].client, "repeated", f"a second outcome of task {task.id!r}; the first one counts")
        else:
            waiting[index] = outcome
        while turn in waiting:
            yield tasks[turn], waiting.pop(turn)
            turn += 1
    for index in range(turn, len(tasks)):
        missing = ClientFailure(tasks[index].id, "unreachable", "the engine ended without an outcome for it")
        yield tasks[index], waiting.get(index, missing)


def _entry(client: int, kind: str, message: str) -> dict[str, Any]:
    message = str(message)
    cut = f"{message[:MESSAGE_LENGTH]} ..." if len(message) > MESSAGE_LENGTH else message
    return {"client": client, "kind": kind if kind in get_args(FailureKind) + IGNORED else "rejected", "message": cut}
