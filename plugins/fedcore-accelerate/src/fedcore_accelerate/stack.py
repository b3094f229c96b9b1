"""The runner of stacks: trainings of several clients proceed side by side, and take like steps as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

from fedcore.client import Begin, Memory, OneByOne, Setup, WorkingModel, take_step
from fedcore.engines import ClientTask, Outcome
from fedcore_accelerate.places import Places
from fedcore_accelerate.stacked_step import Path, value_at
from fedcore_accelerate.stacks import Group, Stack
from fedcore_accelerate.steps import Steps, with_share_of_time
from fedcore_accelerate.tuning import why_unstacked
from fedcore_accelerate.whole import Whole, applies

Errors = Sequence[Exception | None]
"""The exceptions that clients' steps raised."""

T = TypeVar("T")


class StackWarning(UserWarning):
    """Clients train one by one although the run asks for stacks: slower, with the same result up to rounding."""


class _Member(Steps):
    """A client in a stack, with its next step."""

    slot = 0
    """Its slice of the stack."""

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
            self._numbers if session.config.optimizer != "sgd" else None,
        )

    @property
    def _numbers(self) -> Hashable:
        """What Adam's numbers of steps follow from: the steps, and the parameters that earlier epochs left out."""
        session = self.session
        if not session.requests.frozen:
            return session.steps
        epochs = range(self.step.batch.epoch)
        return session.steps, tuple(session.requests.excluded(epoch, session.work.epochs) for epoch in epochs)


class Stacks:
    """Trains all clients whose trainings come together in a stack.

    :param together: the number of clients in a stack.
    """

    def __init__(self, together: int) -> None:
        self.together = together
        self._workings: list[WorkingModel] = []
        self._stack = Stack([])
        self._whole = Whole()
        self._as_whole: bool | None = None
        """Whether stacks may be trained as one whole; None before the first."""
        self._warned = False

    def working(self, setup: Setup) -> WorkingModel:
        """Return the working model of the first place in the stack; the only one if no clients train as one."""
        self._one_by_one = OneByOne() if why_unstacked(setup) else None  # of which the run tells at its start
        if self._one_by_one is not None:
            return self._one_by_one.working(setup)
        self._places = Places(setup, Memory)
        return self._places.models[0]

    def run(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome]:
        """Take all steps; see :class:`fedcore.client.runner.Runner`."""
        if self._one_by_one is not None:
            return self._one_by_one.run(tasks, begin)
        with suppress(Exception):  # as in :meth:`_try`; who trains client by client then names the reason
            if self._as_whole is None:
                self._as_whole = applies(begin.runtime)
            if self._as_whole and (done := self._whole.train(tasks, begin)) is not None:
                return done
        outcomes: dict[int, Outcome] = {}
        members: list[_Member] = []
        for asked, training in self._places.trainings(tasks, begin):
            member = _Member(asked, training)
            if member.advance():
                member.slot = len(members)
                members.append(member)
            else:
                outcomes[asked] = member.outcome
        if members:
            self._train(members, outcomes)
        return [with_share_of_time(outcomes[asked], max(1, len(members))) for asked in sorted(outcomes)]

    def _train(self, members: list[_Member], outcomes: dict[int, Outcome]) -> None:
        """Take all steps of all clients; add the outcomes by the number of the training."""
        stack = self._try(lambda: self._begin(members)) if len(members) > 1 else None
        groups: dict[Hashable, Group | None] = {}
        while members:
            turn = min(member.turn for member in members)
            now = [member for member in members if member.turn == turn]
            # A run: neighbours in the stack (slot minus position is the same), whose steps are of one kind.
            for _, run in groupby(enumerate(now), lambda pair: (pair[1].slot - pair[0], pair[1].kind)):
                together = [member for _, member in run]
                errors = self._together(together, groups) if stack and len(together) > 1 else None
                for member, error in zip(together, errors or map(_alone, together), strict=True):
                    if not member.advance(error):
                        outcomes[member.asked] = member.outcome
            members = [member for member in members if member.asked not in outcomes]

    def _begin(self, members: Sequence[_Member]) -> Stack:
        """Return the stack with the clients' weights and optimizer state. Their working models are its first ones."""
        workings = [member.session.working for member in members]
        if any(mine is not own for mine, own in zip(self._workings, workings)) or len(workings) > len(self._workings):
            self._workings, self._stack = workings, Stack(workings)
        return self._stack.begin([member.session for member in members])

    def _together(self, members: Sequence[_Member], groups: dict[Hashable, Group | None]) -> Errors | None:
        """Take a step of each client as one; return their exceptions. None: it was not possible, and nothing changed.

        :param groups: the groups of this stack; None for one that cannot be stacked.
        """
        sessions = [member.session for member in members]

        def values_of(path: Path) -> list[Any]:
            return [value_at(session, path) for session in sessions]

        key = members[0].slot, len(members), sessions[0].excluded
        if key not in groups:
            groups[key] = self._try(lambda: Group(self._stack, *key[:2], sessions[0], values_of))
        group = groups[key]
        errors = None if group is None else self._try(lambda: group.take([member.step.batch for member in members]))
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
                if reason.startswith("vmap: called random operation"):
                    reason = "a hook or the model draws random numbers, as dropout does"
                warnings.warn(f"--stack: clients train one by one: {reason}", StackWarning, stacklevel=2)
            return None


def _noted(notes: Mapping[str, Mapping[str, Any]]) -> Hashable:
    """Return the names of plugins' notes. A hook may ask whether there is a note, and sees the first client's."""
    return tuple((plugin, *values) for plugin, values in notes.items() if values)


def _alone(member: _Member) -> Exception | None:
    """Take a step of one client; return the exception if it raises."""
    try:
        with member.step.stream.running():
            take_step(member.step.batch)
    except Exception as error:
        return error
    return None
