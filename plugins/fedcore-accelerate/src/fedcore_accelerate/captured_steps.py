"""Steps on CUDA: a step is recorded once as a graph, then replayed in one launch.

A replay runs no Python. A graph may be replayed only if the hooks would do the same again. The first step of a kind
therefore shows its hooks a :class:`WatchedStep`, which notes whether they read the round, the epoch, the client or the
batch. According to these notes, a graph is valid while the learning rate stays the same, for one round, or for one
client's session. A step whose hooks read the batch is never captured. Nor is a step that rebinds tensors of the
client's ``scratch`` or ``state``; it may update them in place. Nor is one that changes an attribute of the network,
such as a count of its calls. The first step of a kind runs eagerly, which also warms the libraries up. The second is
captured.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fedcore import ClientContext, PluginCallError
from fedcore.client import Batch, BatchStep, LocalSession, Picked, SessionContext, take_step
from fedcore.models import Outputs
from fedcore_accelerate.recorder import CudaRecorder, Launch
from fedcore_accelerate.stacked_step import Attributes

OF_STEP = {
    "client": "client",
    "added": "client",
    "frozen": "client",
    "previous_model": "client",
    "round": "round",
    "progress": "round",
    "epoch": "epoch",
    "random": "batch",
}
"""Attribute of a step -> the kind of value that a hook reads with it. A graph would fix this value."""

OF_CLIENT = {"steps", "forward", "gradients"}
"""Attributes of a step's client that change from batch to batch."""


class WatchedStep(BatchStep):
    """A step that notes what the plugin reads.

    :param reads: the notes: ``round``, ``client``, ``epoch`` or ``batch`` are added to it.
    """

    def __init__(self, reads: set[str], batch: Batch, outputs: Outputs) -> None:
        super().__init__(batch, outputs)
        vars(self).update(_reads=reads)

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in OF_STEP:
            self._reads.add(OF_STEP[name])
        return super().__getattribute__(name)

    @property
    @override
    def client(self) -> ClientContext:
        return WatchedClient(self._reads, self._session, self._plugin)

    @override
    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        if self._second is not None and _has_drawn(self._session, self._second.before):
            self._reads.add("batch")
        return super().gradients_at(weights, rows)


def _has_drawn(session: LocalSession, before: Tensor | None) -> bool:
    """Return whether a step has drawn random numbers. A replay cannot set their state: such a step is not replayed.

    :param before: the state of the device's generator before the step.
    """
    now = session.working.memory.random_state(session.working.device)
    if now is None or before is None:
        return False
    # The states are on the CPU for every device. The kit takes torch.equal in a step for a wait for the device.
    first, last = (ctypes.string_at(state.data_ptr(), state.numel()) for state in (before, now))
    return first != last


class WatchedClient(SessionContext):
    """The client of a step, with the same notes as :class:`WatchedStep`."""

    def __init__(self, reads: set[str], session: LocalSession, plugin: str) -> None:
        super().__init__(session, plugin)
        vars(self).update(_reads=reads)

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in OF_CLIENT:
            self._reads.add("batch")
        return super().__getattribute__(name)


def take_watched_step(batch: Batch) -> set[str]:
    """Take a step; return which of ``round``, ``client``, ``epoch`` and ``batch`` its hooks read."""
    reads: set[str] = set()
    take_step(batch, partial(WatchedStep, reads))
    return reads


class Kind(NamedTuple):
    """The constants in a graph, apart from the values that hooks read."""

    batch_size: int
    lr: float
    excluded: frozenset[str]

    @classmethod
    def of(cls, batch: Batch) -> Kind:
        """Return the constants of the step on a batch."""
        return cls(len(batch.picked.positions), batch.session.lr, batch.session.excluded)


class Key(NamedTuple):
    """A kind of step with the values that its hooks read; None for values that they did not read."""

    kind: Kind
    session: LocalSession | None = None
    round: int | None = None
    epoch: int | None = None

    @classmethod
    def of(cls, batch: Batch, reads: Collection[str]) -> Key:
        """Return the key of the step on a batch.

        :param reads: the kinds of values that its hooks read.
        """
        session = batch.session
        return cls(
            Kind.of(batch),
            session if "client" in reads else None,
            session.round if "round" in reads else None,
            batch.epoch if "epoch" in reads else None,
        )

    def fits(self, batch: Batch) -> bool:
        """Return whether hooks would read the same values on a batch of this kind."""
        values = (batch.session, batch.session.round, batch.epoch)
        return all(own in (None, value) for own, value in zip(self[1:], values, strict=True))

    def serves(self, round: int, lr: float) -> bool:
        """Return whether a client of a round, with its learning rate, can take the step."""
        return self.kind.lr == lr and self.round in (None, round)


@dataclass
class Captured:
    """A recorded step, with the tensors from which it reads its batch, and the losses that it adds."""

    launch: Launch
    batch: Picked
    losses: tuple[str, ...]


SEEN, REFUSED = "seen", "refused"


class CaptureWarning(UserWarning):
    """A training step could not be captured and runs eagerly: slower, with the same result."""


class StepGraphs:
    """The captured steps of one working model."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self.recorder = recorder
        self._steps: dict[Kind, dict[Key, Captured | str]] = {}

    def begin_round(self, round: int, lr: float) -> None:
        """Drop the steps that were captured for an earlier round or another learning rate: a graph holds memory.

        :param lr: the learning rate of the round, which is the same for all its clients.
        """
        self._keep(lambda key: key.serves(round, lr))

    def forget(self, session: LocalSession) -> None:
        """Drop the steps of a session that has ended, or that allocates its frozen outputs and momentum again."""
        self._keep(lambda key: key.session is not session)

    def _keep(self, which: Callable[[Key], bool]) -> None:
        steps = {kind: {key: step for key, step in own.items() if which(key)} for kind, own in self._steps.items()}
        self._steps = {kind: own for kind, own in steps.items() if own}

    def take_step(self, batch: Batch) -> None:
        """Take one optimizer step: replay a captured step, capture a step that was seen before, else run it eagerly."""
        session, (key, step) = batch.session, self.find(batch)
        if isinstance(step, Captured):
            step.batch.copy_(batch.picked)
            step.launch()
            session.losses.counts.update(step.losses)
        elif step == SEEN:
            self._steps[key.kind][key] = self._capture(session, batch)
        elif step == REFUSED:
            take_step(batch)
        else:
            before, attributes = held(session), Attributes(session.working.plain)
            reads = take_watched_step(batch) | ({"client"} if has_own_tensors(session) else set())
            if attributes.changed():
                self.forget(session)
                session.scratch["fedcore"]["attributes"] = True
            elif "batch" in reads or same(before, held(session)):
                self._steps.setdefault(key.kind, {})[Key.of(batch, reads)] = REFUSED if "batch" in reads else SEEN

    def find(self, batch: Batch) -> tuple[Key, Captured | str | None]:
        """Return the key of the step on a batch, and its captured form, SEEN or REFUSED; None for a new step."""
        kind = Kind.of(batch)
        for key, step in self._steps.get(kind, {}).items():
            if key.fits(batch):
                return key, step
        return Key(kind), None

    def _capture(self, session: LocalSession, batch: Batch) -> Captured | str:
        """Record a step and take it; return REFUSED if it cannot be captured."""
        own = batch.picked.clone()
        before, counts, names = held(session), session.losses.counts.copy(), set(session.losses.sums)
        attributes = Attributes(session.working.plain)
        session.optimizer.zero_grad()
        try:
            launch = self.recorder.record(partial(take_step, replace(batch, picked=own)))
        except (RuntimeError, PluginCallError) as error:
            session.losses.counts = counts
            session.optimizer.zero_grad()
            reason = str(error).partition("\n")[0]
            warnings.warn(f"a training step cannot be captured: {reason}", CaptureWarning, stacklevel=2)
            self._steps[Kind.of(batch)] = {Key(Kind.of(batch)): REFUSED}
            take_step(batch)
            return REFUSED
        launch()
        if not same(before, held(session)) or session.losses.sums.keys() != names or attributes.changed():
            session.scratch["fedcore"]["step"] = launch  # kept: its memory pool holds tensors that hooks refer to
            return REFUSED
        return Captured(launch, own, tuple(session.losses.counts - counts))


def has_own_tensors(session: LocalSession) -> bool:
    """Return whether a session uses tensors that the next one does not: its captured steps then serve it alone.

    What a network keeps in attributes, such as a mask, is made anew for each client.
    """
    own = session.memory is not session.working.memory or session.plugins.implements("local_samples")
    return own or "attributes" in session.scratch["fedcore"]


def held(session: LocalSession) -> dict[tuple[str, str], Any]:
    """Return the plugins' values of this client, by plugin and name; :func:`same` compares them."""
    values: dict[tuple[str, str], Any] = {}
    for plugin in session.scratch:
        values.update({(plugin, f"scratch/{name}"): value for name, value in session.scratch[plugin].items()})
        values.update({(plugin, f"state/{name}"): value for name, value in session.states.of(plugin).items()})
    return {name: _marked(value, session.working.device) for name, value in values.items()}


def _marked(value: Any, device: torch.device) -> Any:
    """Return a value in a form that shows changes that a graph does not record."""
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
