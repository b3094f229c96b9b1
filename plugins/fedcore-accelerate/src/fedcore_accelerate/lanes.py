"""The runner of ``--lanes``: several clients side by side on one GPU, in this process.

Every client trains in a lane. A lane has a working model of its own, so clients share nothing but the data set. All
lanes move in lockstep: each lane plans its next step, and one launch takes the steps of several lanes. A lane whose
training has ended begins the next one.

Steps that a graph takes for any client (:class:`fedcore_accelerate.captured_steps.StepGraphs`) write to the memory of
their lane only. Steps of several lanes can therefore run side by side: they are recorded once more, each as a branch of
one graph. Steps that read their client, or that cannot be captured, are taken one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from fedcore import PluginCallError
from fedcore.client import Begin, LocalSession, Setup, WorkingModel, take_step
from fedcore.engines import ClientTask, Outcome
from fedcore_accelerate.captured_steps import REFUSED, SEEN, Captured, CaptureWarning, Key, StepGraphs
from fedcore_accelerate.graphs import FixedMemory, Graphs
from fedcore_accelerate.places import Places, hooked_parameter
from fedcore_accelerate.recorder import LaunchBranches
from fedcore_accelerate.steps import PlannedStep, Steps, with_share_of_time

MOST_GRAPHS = 32
"""The number of combinations of steps that are kept as graphs. Clients of different sizes could make any number."""

TRAININGS_PER_LANE = 4
"""The number of trainings that come together for each lane: lanes with short trainings take more of them."""


class Lanes(Graphs):
    """Takes the steps of several trainings side by side.

    :param lanes: how many trainings; each has a model and captured steps of its own on the device.
    """

    def __init__(self, device: torch.device, lanes: int) -> None:
        super().__init__(device)
        self.lanes, self.together = lanes, TRAININGS_PER_LANE * lanes
        self._branches = Branches([])

    def working(self, setup: Setup) -> WorkingModel:
        """Return the working model of the first lane."""
        self.lanes = 1 if hooked_parameter(setup.model) else self.lanes
        self._places = Places(setup, FixedMemory)
        return self._places.models[0]

    def run(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome]:
        """Take all steps; see :class:`fedcore.client.runner.Runner`."""
        waiting = self._places.trainings(tasks, begin)
        outcomes: dict[int, Outcome] = {}
        active: list[Steps] = []
        began = 0
        with self.recorder.running():
            while True:
                while len(active) < self.lanes and (following := next(waiting, None)) is not None:
                    steps = Steps(*following)
                    if steps.advance():
                        self._begin(steps.session)
                        active.append(steps)
                        began += 1
                    else:
                        outcomes[steps.asked] = steps.outcome
                if not active:
                    break
                active = [steps for steps, error in self._step(active) if self._go_on(steps, error, outcomes)]
        share = max(1, min(self.lanes, began))
        return [with_share_of_time(outcomes[asked], share) for asked in sorted(outcomes)]

    def _begin(self, session: LocalSession) -> None:
        graphs = self.of(session)
        graphs.begin_round(session.round, session.lr)
        if graphs not in self._branches.lanes:
            self._branches.lanes.append(graphs)

    def _step(self, active: Sequence[Steps]) -> list[tuple[Steps, Exception | None]]:
        """Take a step of each training; return them with the exceptions that steps raised."""
        lane_of = {self._branches.lanes.index(self.of(steps.session)): steps for steps in active}
        taken = self._branches.together({lane: steps.step for lane, steps in lane_of.items()})
        results: list[tuple[Steps, Exception | None]] = []
        for lane, steps in lane_of.items():
            error = None
            if lane not in taken:
                try:
                    self._branches.alone(lane, steps.step)
                except Exception as raised:  # hooks can raise anything
                    error = raised
            results.append((steps, error))
        return results

    def _go_on(self, steps: Steps, error: Exception | None, outcomes: dict[int, Outcome]) -> bool:
        """Ask a training for its next step; return whether there is one, else note its outcome."""
        session = steps.session
        if steps.advance(error):
            return True
        self.of(session).forget(session)
        outcomes[steps.asked] = steps.outcome
        return False


Combination = tuple[tuple[int, Key], ...]
"""Pairs of a lane and the step that it takes."""


class Branches:
    """The graphs that take steps of several lanes at once.

    :param lanes: the captured steps of each lane. All of them use the same recorder.
    """

    def __init__(self, lanes: list[StepGraphs]) -> None:
        self.lanes = lanes
        self._graphs: dict[Combination, LaunchBranches | str] = {}

    def alone(self, lane: int, step: PlannedStep) -> None:
        """Take a step of one lane."""
        with step.stream.running():
            self.lanes[lane].take_step(step.batch)

    def together(self, steps: Mapping[int, PlannedStep]) -> set[int]:
        """Take the steps that one graph can take; return their lanes.

        :param steps: the next step of each lane.
        """
        ready: dict[int, Captured] = {}
        keys: list[tuple[int, Key]] = []
        for lane, step in steps.items():
            key, captured = self.lanes[lane].find(step.batch)
            if isinstance(captured, Captured) and key.session is None:
                keys.append((lane, key))
                ready[lane] = captured
        if len(ready) < 2:
            return set()
        combination = tuple(keys)
        launch = self._graphs.get(combination)
        if launch is None:
            self._begin_round(steps[keys[0][0]].batch.session)
            self._note(combination, SEEN)
        elif launch == SEEN:
            launch = self._record([(steps[lane], captured) for lane, captured in ready.items()])
            self._note(combination, launch)
        elif not isinstance(launch, str):
            for lane, captured in ready.items():
                captured.batch.copy_(steps[lane].batch.picked)
                steps[lane].batch.session.losses.counts.update(captured.losses)
            launch([steps[lane].stream for lane in ready])
        return set() if launch is None or isinstance(launch, str) else {*ready}

    def _begin_round(self, session: LocalSession) -> None:
        """Drop the graphs that no client of this session's round can use."""
        self._graphs = {
            combination: launch
            for combination, launch in self._graphs.items()
            if all(key.serves(session.round, session.lr) for _, key in combination)
        }

    def _note(self, combination: Combination, launch: LaunchBranches | str) -> None:
        """Keep a graph; drop the oldest graphs if there are too many."""
        self._graphs.pop(combination, None)
        while len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[combination] = launch

    def _record(self, steps: Sequence[tuple[PlannedStep, Captured]]) -> LaunchBranches | str:
        """Record steps as branches and take them; return REFUSED if they cannot be recorded."""
        counts = [step.batch.session.losses.counts.copy() for step, _ in steps]
        branches, streams = [], [step.stream for step, _ in steps]
        for step, captured in steps:
            captured.batch.copy_(step.batch.picked)
            step.batch.session.optimizer.zero_grad()
            branches.append(partial(take_step, replace(step.batch, picked=captured.batch)))
        try:
            launch = self.lanes[0].recorder.record_branches(branches, streams)
        except (RuntimeError, PluginCallError) as error:
            for (step, _), before in zip(steps, counts, strict=True):
                step.batch.session.losses.counts = before
                step.batch.session.optimizer.zero_grad()
            reason = str(error).partition("\n")[0]
            warnings.warn(f"steps cannot be branches of one graph: {reason}", CaptureWarning, stacklevel=2)
            return REFUSED
        launch(streams)
        return launch
