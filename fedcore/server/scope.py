"""The objects that the server works with: the federation during a whole run, a scope between two commits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_low
from typing import Any, Literal, Self, TypeVar

from torch import Tensor

from fedcore.base.config import RunConfig
from fedcore.base.errors import DivergedError, PluginCallError, RejectUpdate
from fedcore.base.plugin_state import States
from fedcore.base.tensors import bytes_of, out_of_range
from fedcore.base.types import Tensors
from fedcore.client.messages import ClientFailure, ClientTask, Engine, Outcome, SharedPayload
from fedcore.client.setup import Setup
from fedcore.client.store import ClientStore
from fedcore.data import Dataset, Partition
from fedcore.server.state import Ledger, ServerState
from fedcore.server.system import UNREACHED, Everybody, SimulatedOutcome, System
from fedcore.server.validation import UpdateValidator

MESSAGE_LENGTH = 1000
FAR = 100
"""An update whose largest value is so many times the median client's is an outlier."""

Phase = Literal[
    "select_clients", "begin_round", "round", "aggregate", "end_round", "post_train", "evaluation", "report"
]
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Federation:
    """Set-up, data and engine of a run, with the validator and the system made from them."""

    setup: Setup
    dataset: Dataset
    partition: Partition
    engine: Engine
    store: ClientStore
    """The clients' states."""

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.setup.config

    @cached_property
    def validator(self) -> UpdateValidator:
        """Validates the outcomes that clients send."""
        return UpdateValidator(self.setup, self.partition, self.store)

    @cached_property
    def system(self) -> System:
        """Says which clients are available, lost, late and slow. Without ``--system`` all clients take part."""
        for section in RunConfig.sections():
            simulated: System | None = section.simulated(self.config, self.partition.train.size, self.setup.breaks)
            if simulated is not None:
                return simulated
        return Everybody(self.config.training_clients, self.config.local_work[1])


@dataclass
class ServerScope:
    """The server's work outside of a round: evaluation, reports, ``post_train``. It is a context manager."""

    federation: Federation
    committed: ServerState
    """The state from which the scope starts. It never changes."""
    number: int
    """The round that hooks see, from 0."""
    phase: Phase
    model: Tensors = field(init=False)
    """The global model. It may change before it is committed."""
    states: States = field(init=False)
    """The plugins' server states. They may change before they are committed."""
    ledger: Ledger = field(default_factory=Ledger)
    """The bytes sent and received in this scope."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The clients without a usable outcome."""
    ignored: list[dict[str, Any]] = field(default_factory=list)
    """The outcomes that changed nothing."""
    shared_keys: list[str] = field(default_factory=list)
    """The keys of the payloads that the engine holds until this scope is closed."""
    notes: set[tuple[str, str]] = field(default_factory=set)
    """Plugins with their notes. Hooks are called in an order that depends on the workers; records sort the notes."""
    questions: int = 0
    """The number of questions so far."""
    # Of a round; empty outside of one.
    cohort: list[int] = field(default_factory=list)
    """The selected clients."""
    accepted: list[int] = field(default_factory=list)
    """The clients whose updates were accepted so far."""
    weights: dict[int, float] = field(default_factory=dict)
    """Client -> the weight of its accepted update in the mean."""
    frozen: frozenset[str] = frozenset()
    """The parameters that no accepted client trained."""
    buffers: Tensors = field(default_factory=dict)
    """The buffers of the next model, once they are averaged."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Client -> its staleness, if clients train without waiting for each other."""

    def __post_init__(self) -> None:
        self.model, self.states = dict(self.committed.model), States(self.committed.plugins)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the shared payloads."""
        for key in self.shared_keys:
            self.federation.engine.unshare(key)
        self.shared_keys.clear()

    @cached_property
    def available(self) -> Sequence[int]:
        """The clients that can be selected, in ascending order."""
        return self.federation.system.available(self.number)

    @property
    def lr(self) -> float:
        """The local learning rate of the round; after it, in an evaluation or ``post_train``, that of the last round.

        The next round's can be 0: a cosine ends there.
        """
        return self.federation.config.learning_rate(max(0, self.number - (self.phase in ("evaluation", "post_train"))))

    def as_of_now(self) -> Self:
        """Return a copy that does not see what happens to this scope's model, states and clients from now on."""
        plugins = self.states.snapshot()
        self.states = States(plugins)  # changes in place reach copies of these values
        snapshot = copy.copy(self)
        snapshot.committed = replace(self.committed, plugins=plugins)
        snapshot.accepted = list(self.accepted)
        return snapshot

    def commit(self, **more: Any) -> ServerState:
        """Return the state to commit: this scope's model and plugins' states, and the bytes sent and received in it.

        :param more: other fields that change, or other values for these fields.
        :raises DivergedError: a plugin's state is not finite.
        """
        ledger = Ledger.of(self.committed.ledger)
        ledger.update(self.ledger)
        plugins = self.states.snapshot()
        for plugin, values in plugins.items():
            before = self.committed.plugins.get(plugin, {})
            changed = {n: v for n, v in values.items() if isinstance(v, Tensor) and v is not before.get(n)}
            if broken := out_of_range(changed, math.inf):
                when = "post_train" if self.phase == "post_train" else f"round {self.number + 1}"
                raise DivergedError(
                    f"{when}: server.state[{broken[0]!r}] of plugin {plugin!r} is not finite. The state before it is "
                    "kept."
                )
        return replace(self.committed, **{"model": self.model, "plugins": plugins, "ledger": ledger.as_json(), **more})

    def share(self, key: str, broadcast: Mapping[str, Tensors]) -> dict[str, int]:
        """Send the model and the broadcasts to the engine once. The clients' tasks refer to them by the key.

        :returns: the bytes that each client of these tasks receives, by sender.
        """
        setup = self.federation.setup
        model = {name: self.model[name] for name in setup.layout.shared}
        self.federation.engine.share(key, SharedPayload(model, broadcast, self.lr, setup.fixed_digest))
        self.shared_keys.append(key)
        return {"model": bytes_of(model), **{plugin: bytes_of(tensors) for plugin, tensors in broadcast.items()}}

    def reachable(self, clients: Iterable[int]) -> Iterator[int]:
        """Yield the clients that a question reaches. Outside of a round the server waits for all of them."""
        yield from clients

    def outcomes(self, tasks: list[ClientTask], *, window: int | None = None) -> Iterator[tuple[ClientTask, Outcome]]:
        """Run tasks; yield exactly one outcome of each, in the order of the tasks."""
        return in_order(tasks, self.federation.engine.run(tasks, window=window), self.ignore)

    def answers(
        self, tasks: list[ClientTask], parse: Callable[[ClientTask, Outcome], Parsed], *, window: int | None = None
    ) -> Iterator[tuple[ClientTask, Parsed | None]]:
        """Run tasks; yield each with the result of ``parse``, or with None if the client is recorded as failed.

        :param parse: takes a task and its outcome; raises RejectUpdate for an outcome that is not usable.
        :raises PluginCallError: a question raised on every client.
        """
        raised: list[str] = []
        for task, outcome in self.outcomes(tasks, window=window):
            answer = None
            details = {"question": f"{task.meta['plugin']}.{task.meta['question']}"} if task.kind == "ask" else {}
            if isinstance(outcome, ClientFailure):
                self.fail(task.client, outcome.kind, outcome.message, **details)
                if details and outcome.kind == "raised":
                    raised.append(outcome.message)
            else:
                try:
                    answer = parse(task, outcome)
                except RejectUpdate as error:
                    self.fail(task.client, error.kind, str(error), **details)
            yield task, answer
        if raised and len(raised) == len(tasks):
            plugin, question = tasks[0].meta["plugin"], tasks[0].meta["question"]
            raise PluginCallError(raised[0], plugin=plugin, hook=f"question {question}")

    def record(self) -> dict[str, Any]:
        """Return failures, bytes and notes as entries of the record."""
        notes = [{"plugin": plugin, "message": message} for plugin, message in sorted(self.notes)]
        counted = {"failures": self.failures, "ignored": self.ignored, "bytes": self.ledger.as_json()}
        return {**counted, **({"notes": notes} if notes else {})}

    def fail(self, client: int, kind: str, message: str, **more: str) -> None:
        """Record a client without a usable outcome. The message is cut to MESSAGE_LENGTH characters.

        A client with a name, such as a hospital's, has it before the message.

        :param more: the ``question`` that the client did not answer.
        """
        if "names" in self.federation.partition.info:
            message = f"{self.federation.partition.names[client]}: {message.removeprefix(f'client {client}: ')}"
        self.failures.append(_entry(client, kind, message) | more)

    def ignore(self, client: int, kind: str, message: str) -> None:
        """Record an outcome that changed nothing."""
        self.ignored.append(_entry(client, kind, message))


@dataclass
class Round(ServerScope):
    """A round in progress."""

    phase: Phase = "round"
    simulated: dict[int, SimulatedOutcome] = field(default_factory=dict)
    """Client -> its outcome in the simulated system."""
    arrived: int = 0
    """The number of outcomes that are not failures of their clients."""
    largest: dict[int, float] = field(default_factory=dict)
    """Client -> the largest magnitude in its accepted update, payload included."""
    raised: list[PluginCallError] = field(default_factory=list)
    """The errors of plugins for which updates are left out."""
    work: dict[int, int] = field(default_factory=dict)
    """Client -> its local epochs or ``Steps``, if ``select_clients`` chose them."""
    _unreached: set[int] = field(default_factory=set)

    @property
    def outliers(self) -> dict[str, float]:
        """Client -> the largest magnitude in its update, if that is more than FAR times the median client's."""
        typical = median_low(self.largest.values()) if self.largest else 0.0
        return {str(client): value for client, value in self.largest.items() if value > FAR * typical > 0}

    def reachable(self, clients: Iterable[int]) -> Iterator[int]:
        """Yield the clients that a question reaches in this round, and record each other client."""
        for client in clients:
            if self.federation.system.reachable(self.number, client):
                yield client
            elif self.phase == "select_clients":  # :meth:`select` records it, unless it is in the cohort
                self._unreached.add(client)
            elif client not in self.simulated:  # a client of the cohort is recorded when its training fails
                self.fail(client, "unavailable", UNREACHED)

    def select(self, cohort: Mapping[int, int | None]) -> None:
        """Fix the cohort and simulate its outcomes.

        :param cohort: client -> its local epochs or ``Steps``, or None for the run's work.
        """
        self.cohort += cohort
        self.work = {client: work for client, work in cohort.items() if work is not None}
        system = self.federation.system
        self.simulated = {client: system.simulated(self.number, client, work) for client, work in cohort.items()}
        for client in sorted(self._unreached.difference(cohort)):
            self.fail(client, "unavailable", UNREACHED)

    def dispatch_order(self) -> list[int]:
        """Return the cohort in dispatch order: its tasks are sent and its updates are taken in this order."""
        return sorted(sorted(self.cohort), key=self.federation.partition.train.size, reverse=True)


def _entry(client: int, kind: str, message: str) -> dict[str, Any]:
    cut = f"{message[:MESSAGE_LENGTH]} ..." if len(message) > MESSAGE_LENGTH else message
    return {"client": client, "kind": kind, "message": cut}


def in_order(
    tasks: list[ClientTask],
    outcomes: Iterable[tuple[ClientTask, Outcome]],
    ignore: Callable[[int, str, str], None] = lambda client, kind, message: None,
) -> Iterator[tuple[ClientTask, Outcome]]:
    """Yield exactly one outcome of every task, in the order of the tasks. Early outcomes are held back.

    A second outcome of a task is dropped. An outcome of an unknown task is dropped, too. If a task has no outcome, it
    fails.

    :param ignore: called with client, kind and message of each dropped outcome.
    """
    position = {task.id: index for index, task in enumerate(tasks)}
    waiting: dict[int, Outcome] = {}
    turn = 0
    for task, outcome in outcomes:
        index = position.get(task.id)
        if index is None:
            ignore(task.client, "unasked", f"an outcome of task {task.id!r}, which was not awaited")
        elif index < turn or index in waiting:
            ignore(tasks[index].client, "repeated", f"a second outcome of task {task.id!r}; the first one counts")
        else:
            waiting[index] = outcome
        while turn in waiting:
            yield tasks[turn], waiting.pop(turn)
            turn += 1
    for index in range(turn, len(tasks)):
        missing = ClientFailure("unreachable", "the engine ended without an outcome for it")
        yield tasks[index], waiting.get(index, missing)
