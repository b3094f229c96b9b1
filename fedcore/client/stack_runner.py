"""Work on the tasks of several clients at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from fedcore.base.errors import FedcoreError, PluginCallError
from fedcore.base.types import ClientUpdate
from fedcore.client.branches import PlannedStep
from fedcore.client.loop import take_step
from fedcore.client.messages import ClientTask, Outcome, SharedPayload
from fedcore.client.runtime import ClientRuntime
from fedcore.client.stacks import Group, Stack

Handle = Callable[[Sequence[ClientTask], SharedPayload | None], list[Outcome]]


class StackWarning(UserWarning):
    """Clients train one by one although ``--stack`` asks for stacks."""


def handler(runtime: ClientRuntime) -> Handle:
    """Return the function that works on tasks that came together."""
    if runtime.config.stack:
        return StackRunner(runtime).handle
    return lambda tasks, shared: [runtime.handle(task, shared) for task in tasks]


@dataclass
class _Lane:
    number: int
    task: int
    step: PlannedStep
    steps: Generator[PlannedStep, None, Outcome]


class StackRunner:
    """Takes the steps of several clients as one, where they can be stacked."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtimes = [runtime]
        self._stack: Stack | None = None

    def handle(self, tasks: Sequence[ClientTask], shared: SharedPayload | None) -> list[Outcome]:
        """Run tasks; return their outcomes in the same order."""
        first = self._runtimes[0]
        if len(tasks) == 1:
            return [first.handle(tasks[0], shared)]
        if len(tasks) > len(self._runtimes):
            self._runtimes += [first.beside() for _ in range(len(tasks) - len(self._runtimes))]
            self._stack = Stack([runtime.working for runtime in self._runtimes])
        outcomes: dict[int, Outcome] = {}
        lanes: list[_Lane] = []
        # Neighbours should have like steps: clients with and without a previous model do not.
        for number in sorted(range(len(tasks)), key=lambda number: tasks[number].version is None):
            task = tasks[number]
            steps = self._runtimes[len(lanes)].steps(task, shared)
            try:
                lanes.append(_Lane(len(lanes), number, next(steps), steps))
            except StopIteration as ended:
                outcomes[number] = ended.value
        if lanes:
            self._train(lanes, outcomes)
        own = [outcomes[number] for number in range(len(tasks))]
        return [_with_share_of_time(outcome, len(lanes)) for outcome in own]

    def _train(self, lanes: list[_Lane], outcomes: dict[int, Outcome]) -> None:
        stack = self._stack
        assert stack is not None
        stack.begin([lane.step.batch.session for lane in lanes])
        groups: dict[Any, Group | None] = {}
        while lanes:
            turn = min(_turn(lane) for lane in lanes)
            now = [lane for lane in lanes if _turn(lane) == turn]
            for (_, kind), run in groupby(enumerate(now), lambda pair: (pair[1].number - pair[0], _kind(pair[1]))):
                together = [lane for _, lane in run]
                if len(together) == 1 or not self._stacked(stack, together, groups):
                    for lane in together:
                        self._alone(lane, outcomes)
                else:
                    for lane in together:
                        self._advance(lane, outcomes)
            lanes = [lane for lane in lanes if lane.task not in outcomes]

    def _stacked(self, stack: Stack, lanes: list[_Lane], groups: dict[Any, Group | None]) -> bool:
        batches = [lane.step.batch for lane in lanes]
        key = lanes[0].number, len(lanes), batches[0].session.excluded
        try:
            if key not in groups:
                groups[key] = None
                groups[key] = Group(stack, lanes[0].number, [batch.session for batch in batches])
            group = groups[key]
            if group is None:
                return False
            group.take(batches)
            return True
        except (FedcoreError, RuntimeError, TypeError, ValueError) as error:
            groups[key] = None
            warnings.warn(f"steps cannot be stacked, and are taken one by one: {error}", StackWarning, stacklevel=2)
            return False

    def _alone(self, lane: _Lane, outcomes: dict[int, Outcome]) -> None:
        try:
            with lane.step.stream.running():
                take_step(lane.step.batch.session, lane.step.batch)
        except Exception as error:
            self._advance(lane, outcomes, error)
        else:
            self._advance(lane, outcomes)

    def _advance(self, lane: _Lane, outcomes: dict[int, Outcome], error: Exception | None = None) -> None:
        try:
            lane.step = next(lane.steps) if error is None else lane.steps.throw(error)
        except StopIteration as ended:
            outcomes[lane.task] = ended.value


def _turn(lane: _Lane) -> tuple[int, int]:
    return lane.step.batch.epoch, lane.step.batch.number


def _kind(lane: _Lane) -> Any:
    """Return what the steps of a group have in common."""
    session = lane.step.batch.session
    return (
        len(lane.step.batch.picked.positions),
        session.excluded,
        tuple(frozen.present for frozen in session.working.frozen.values()),
        tuple((group.lr, group.weight_decay, len(group.parameters)) for group in session.requests.groups),
        session.steps if session.config.optimizer != "sgd" else 0,
    )


def _with_share_of_time(outcome: Outcome, clients: int) -> Outcome:
    if not isinstance(outcome, ClientUpdate):
        return outcome
    spent = {name: seconds / clients for name, seconds in outcome.plugin_seconds.items()}
    return replace(outcome, seconds=outcome.seconds / clients, plugin_seconds=spent)
