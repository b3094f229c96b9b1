"""Work on the tasks of several clients at once: their trainings proceed side by side, and take like steps as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from fedcore.base.types import ClientUpdate
from fedcore.client.loop import PlannedStep, take_step
from fedcore.client.messages import ClientTask, Outcome, SharedPayload
from fedcore.client.runtime import ClientRuntime
from fedcore.client.session import LocalSession
from fedcore.client.stacks import Group, Stack

Handle = Callable[[Sequence[ClientTask], SharedPayload | None], list[Outcome]]
"""Works on tasks that came together; returns their outcomes in the same order."""


Errors = Sequence[Exception | None]
"""The exceptions that clients' steps raised."""

T = TypeVar("T")


class StackWarning(UserWarning):
    """Clients train one by one although the run asks for stacks: slower, with the same result up to rounding."""


def handler(runtime: ClientRuntime) -> Handle:
    """Return the function by which a runtime works on tasks, with ``--stack`` in stacks."""
    if runtime.config.stack_size > 1 and not runtime.others:
        return StackRunner(runtime).handle
    return lambda tasks, shared: [runtime.handle(task, shared) for task in tasks]


@dataclass
class _Place:
    """A client in a stack, with its next step."""

    slot: int
    """Its slice of the stack."""
    asked: int
    """The position of its task among the tasks that came together."""
    step: PlannedStep
    steps: Generator[PlannedStep, None, Outcome]

    @property
    def session(self) -> LocalSession:
        return self.step.batch.session

    @property
    def turn(self) -> tuple[int, int]:
        """The local epoch and the number of the batch. Clients wait for those that are not as far."""
        return self.step.batch.epoch, self.step.batch.number

    @property
    def kind(self) -> Hashable:
        """What the steps of a group have in common."""
        session = self.session
        return (
            len(self.step.batch.picked.positions),
            session.excluded,
            _noted(session.scratch),
            _noted(session.states.snapshot()),
            tuple(model.present for model in session.working.frozen.values()),
            tuple((group.lr, group.weight_decay, len(group.parameters)) for group in session.optimizer.groups),
            session.steps if session.config.optimizer != "sgd" else None,
        )


class StackRunner:
    """Trains clients in stacks: all clients whose tasks come together, which the engine decides."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtimes = [runtime]
        self._stack = Stack([])
        self._warned = False

    def handle(self, tasks: Sequence[ClientTask], shared: SharedPayload | None) -> list[Outcome]:
        """Work on tasks; see :data:`Handle`.

        :raises FedcoreError: as :meth:`fedcore.client.runtime.ClientRuntime.handle`.
        """
        first = self._runtimes[0]
        if len(tasks) == 1 or tasks[0].kind != "fit_begin":
            return [first.handle(task, shared) for task in tasks]
        if len(tasks) > len(self._runtimes):
            self._runtimes += [first.beside() for _ in range(len(tasks) - len(self._runtimes))]
            self._stack = Stack([runtime.working for runtime in self._runtimes])
        outcomes: dict[int, Outcome] = {}
        places: list[_Place] = []
        # Neighbours should have like steps. Clients with and without a previous model do not.
        for asked in sorted(range(len(tasks)), key=lambda asked: tasks[asked].version is None):
            slot = len(places)
            steps = self._runtimes[slot].steps(tasks[asked], shared)
            try:
                places.append(_Place(slot, asked, next(steps), steps))
            except StopIteration as ended:
                outcomes[asked] = ended.value
        if places:
            self._train(places, outcomes)
        return [_with_share_of_time(outcomes[asked], len(places)) for asked in range(len(tasks))]

    def _train(self, places: list[_Place], outcomes: dict[int, Outcome]) -> None:
        """Take all steps of all clients; add the outcomes by the position of the task."""
        stack = self._try(lambda: self._stack.begin([place.session for place in places]))
        groups: dict[Hashable, Group | None] = {}
        while places:
            turn = min(place.turn for place in places)
            now = [place for place in places if place.turn == turn]
            # A run: neighbours in the stack (slot minus position is the same), whose steps are of one kind.
            for _, run in groupby(enumerate(now), lambda pair: (pair[1].slot - pair[0], pair[1].kind)):
                together = [place for _, place in run]
                errors = self._together(together, groups) if stack and len(together) > 1 else None
                for place, error in zip(together, errors or map(_alone, together), strict=True):
                    try:
                        place.step = next(place.steps) if error is None else place.steps.throw(error)
                    except StopIteration as ended:
                        outcomes[place.asked] = ended.value
            places = [place for place in places if place.asked not in outcomes]

    def _together(self, places: Sequence[_Place], groups: dict[Hashable, Group | None]) -> Errors | None:
        """Take a step of each client as one; return their exceptions. None: it was not possible, and nothing changed.

        :param groups: the groups of this stack; None for one that cannot be stacked.
        """
        sessions = [place.session for place in places]
        key = places[0].slot, len(places), sessions[0].excluded
        if key not in groups:
            groups[key] = self._try(lambda: Group(self._stack, places[0].slot, sessions))
        group = groups[key]
        errors = None if group is None else self._try(lambda: group.take([place.step.batch for place in places]))
        if errors is None:
            groups[key] = None
        return errors

    def _try(self, function: Callable[[], T]) -> T | None:
        """Call a function. If it raises, name the reason once and return None."""
        try:
            return function()
        except Exception as error:  # hooks and vmap may raise anything; the same steps then run without vmap
            if not self._warned:
                self._warned = True
                reason = str(error).partition("\n")[0]
                warnings.warn(f"--stack: clients train one by one: {reason}", StackWarning, stacklevel=2)
            return None


def _noted(notes: Mapping[str, Mapping[str, Any]]) -> Hashable:
    """Return the names of plugins' notes. A hook may ask whether there is a note, and sees the first client's."""
    return tuple((plugin, *values) for plugin, values in notes.items() if values)


def _alone(place: _Place) -> Exception | None:
    """Take a step of one client; return the exception if it raises."""
    try:
        with place.step.stream.running():
            take_step(place.step.batch)
    except Exception as error:
        return error
    return None


def _with_share_of_time(outcome: Outcome, clients: int) -> Outcome:
    """Return an update with the client's share of the seconds, in which all clients of its stack have trained."""
    if not isinstance(outcome, ClientUpdate):
        return outcome
    spent = {name: seconds / clients for name, seconds in outcome.plugin_seconds.items()}
    return replace(outcome, seconds=outcome.seconds / clients, plugin_seconds=spent)
