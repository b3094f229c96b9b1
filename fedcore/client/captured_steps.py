"""Training steps on CUDA as captured graphs: recorded once, replayed in one launch.

A replay runs no Python, so a graph may be replayed only where the hooks would do the same again.
:class:`fedcore.client.loop.BatchStep` therefore records whether hooks read the round, the epoch, the client or the
batch. A graph is valid while the learning rate stays the same, for one round, or for one client's session, according to
what they read. A step whose hooks read the batch is never captured, and neither is one that rebinds tensors of the
client's ``scratch`` or ``state`` (updates in place are fine). The first step of a kind runs eagerly, which also warms
the libraries up; the second is captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedcore.base.config import RunConfig
from fedcore.base.errors import PluginCallError
from fedcore.client.fixed_tensors import FixedTensors
from fedcore.client.loop import Batch
from fedcore.client.recorder import Launch, Recorder
from fedcore.client.session import LocalSession
from fedcore.data import Dataset
from fedcore.data.client_data import Picked

TrainBatch = Callable[[LocalSession, int, int, Picked], Batch]


class Kind(NamedTuple):
    """The constants that are compiled into a graph, apart from what hooks read."""

    batch_size: int
    lr: float
    excluded: frozenset[str]

    @classmethod
    def of(cls, session: LocalSession, picked: Picked) -> Kind:
        """Return those of a session's step on a batch."""
        return cls(len(picked.positions), session.lr, session.excluded)


class Key(NamedTuple):
    """A kind of step with the values that its hooks read; None for a value that they did not read."""

    kind: Kind
    depends_on: frozenset[str]
    round: int | None
    epoch: int | None

    def serves(self, round: int, lr: float) -> bool:
        """Return whether a client of a round, with its learning rate, can take the step."""
        return self.kind.lr == lr and self.round in (None, round)


def captures(config: RunConfig, device: torch.device, dataset: Dataset) -> bool:
    """Return whether training steps are captured: on CUDA, where all batches of one size have the same shapes."""
    return device.type == "cuda" and config.capture and dataset.train.fixed_shape


@dataclass
class Captured:
    """A recorded step, the tensors that it reads its batch from, and the losses that it adds to."""

    launch: Launch
    batch: Picked
    losses: tuple[str, ...]

    def take(self, picked: Picked) -> None:
        """Take the step on another batch of the same size."""
        self.batch.copy_(picked)
        self.launch()


SEEN, REFUSED = "seen", "refused"


class CaptureWarning(UserWarning):
    """A training step could not be captured and runs eagerly: slower, with the same result."""


class StepGraphs:
    """The captured steps of one client runtime, and the tensors at fixed addresses that they use."""

    def __init__(self, recorder: Recorder, train_batch: TrainBatch) -> None:
        self.recorder = recorder
        self._train_batch = train_batch
        self.fixed = FixedTensors()
        self._steps: dict[Key, Captured | str] = {}
        self._steps_of: WeakKeyDictionary[LocalSession, dict[Key, Captured | str]] = WeakKeyDictionary()
        self._looks: dict[Kind, list[frozenset[str]]] = {}
        self._refused: set[Kind] = set()

    def begin_round(self, round: int, lr: float) -> None:
        """Drop the steps that were captured for an earlier round or another learning rate; a graph holds memory.

        :param lr: the round's, which all its clients have.
        """
        self._steps = {key: step for key, step in self._steps.items() if key.serves(round, lr)}
        self._looks = {kind: looks for kind, looks in self._looks.items() if kind.lr == lr}
        self._refused = {kind for kind in self._refused if kind.lr == lr}

    def forget(self, session: LocalSession) -> None:
        """Drop the steps of a session that has ended, or whose frozen outputs and momentum are allocated again."""
        self._steps_of.pop(session, None)

    def take_step(self, session: LocalSession, epoch: int, number: int, picked: Picked) -> None:
        """Take one optimizer step: replay a captured one, capture one that was seen before, else run it eagerly."""
        kind = Kind.of(session, picked)
        if kind in self._refused:
            self._train_batch(session, epoch, number, picked)
            return
        key, step = self._find(session, kind, epoch)
        if isinstance(step, Captured):
            step.take(picked)
            session.losses.count(step.losses)
        elif key is not None and step == SEEN:
            self._store(session, key, self._capture(session, epoch, number, picked, kind))
        else:
            before = held(session)
            batch = self._train_batch(session, epoch, number, picked)
            if step is None:
                looked = frozenset(batch.depends_on | ({"client"} if session.own_tensors else set()))
                fixed = "batch" not in looked
                if not fixed or same(before, held(session)):
                    self._store(session, self._key(session, kind, looked, epoch), SEEN if fixed else REFUSED)

    def replayable(self, session: LocalSession, epoch: int, picked: Picked) -> tuple[Key, Captured] | None:
        """Return the captured step that takes a batch, if it does so for any client."""
        kind = Kind.of(session, picked)
        key, step = (None, None) if kind in self._refused else self._find(session, kind, epoch)
        if key is None or not isinstance(step, Captured) or "client" in key.depends_on:
            return None
        return key, step

    def _find(self, session: LocalSession, kind: Kind, epoch: int) -> tuple[Key | None, Captured | str | None]:
        for looked in self._looks.get(kind, ()):
            key = self._key(session, kind, looked, epoch)
            step = self._steps_with(session, looked).get(key)
            if step is not None:
                return key, step
        return None, None

    def _steps_with(self, session: LocalSession, looked: frozenset[str]) -> dict[Key, Captured | str]:
        return self._steps_of.setdefault(session, {}) if "client" in looked else self._steps

    def _key(self, session: LocalSession, kind: Kind, looked: frozenset[str], epoch: int) -> Key:
        return Key(kind, looked, session.round if "round" in looked else None, epoch if "epoch" in looked else None)

    def _store(self, session: LocalSession, key: Key, step: Captured | str) -> None:
        self._steps_with(session, key.depends_on)[key] = step
        looks = self._looks.setdefault(key.kind, [])
        if key.depends_on not in looks:
            looks.append(key.depends_on)

    def _capture(self, session: LocalSession, epoch: int, number: int, picked: Picked, kind: Kind) -> Captured | str:
        """Record a step and take it; returns REFUSED where it cannot be captured."""
        own = picked.clone()
        before, counts, names = held(session), session.losses.counts(), session.losses.names()
        session.training.optimizer.zero_grad()

        def train() -> None:
            self._train_batch(session, epoch, number, own)

        try:
            launch = self.recorder.record(train)
        except (RuntimeError, PluginCallError) as error:
            session.losses.restore(counts)
            session.training.optimizer.zero_grad()
            reason = str(error).partition("\n")[0]
            warnings.warn(f"a training step cannot be captured: {reason}", CaptureWarning, stacklevel=2)
            self._refused.add(kind)
            self._train_batch(session, epoch, number, picked)
            return REFUSED
        launch()
        if not same(before, held(session)) or session.losses.names() != names:
            session.scratch["fedcore"]["step"] = launch  # its memory pool holds tensors that hooks refer to
            return REFUSED
        took = tuple(name for name, count in session.losses.counts().items() if count > counts.get(name, 0))
        return Captured(launch, own, took)


def held(session: LocalSession) -> dict[tuple[str, str], Any]:
    """Return the plugins' values of this client, by plugin and name, to be compared with :func:`same`."""
    found: dict[tuple[str, str], Any] = {}
    for plugin in session.scratch:
        found.update({(plugin, f"scratch/{name}"): value for name, value in session.scratch[plugin].items()})
        found.update({(plugin, f"state/{name}"): value for name, value in session.states.of(plugin).items()})
    return {name: _marked(value, session.working.device) for name, value in found.items()}


def _marked(value: Any, device: torch.device) -> Any:
    """Return a value in a form that reveals changes which no graph records."""
    if isinstance(value, list):
        return tuple(_marked(item, device) for item in value)
    if isinstance(value, Tensor) and value.device.type != device.type:
        return value, value._version
    return value


def same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """Return whether both hold identical tensor objects, and equal values of other types."""
    return before.keys() == after.keys() and all(_is_same(value, after[name]) for name, value in before.items())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (not (isinstance(one, Tensor) or isinstance(other, Tensor)) and bool(one == other))
