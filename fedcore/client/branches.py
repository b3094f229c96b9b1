"""Steps of several clients as parallel branches of one captured graph.

Each lane trains one client at a time, with a model and memory of its own. Steps that a graph takes for any client
(:class:`fedcore.client.captured_steps.StepGraphs`) write to the memory of their lane only. Steps of several lanes can
therefore run side by side: they are recorded once more, each as a branch of one graph, and one launch takes them all.
Steps that read their client, or that cannot be captured, are taken one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedcore.base.errors import PluginCallError
from fedcore.client.captured_steps import (
    REFUSED,
    SEEN,
    Captured,
    CaptureWarning,
    Key,
    StepGraphs,
)
from fedcore.client.loop import PlannedStep, take_step
from fedcore.client.recorder import LaunchBranches
from fedcore.client.session import LocalSession

MOST_GRAPHS = 32
"""The number of combinations of steps that are kept as graphs. Clients of different sizes could make any number."""


Combination = tuple[tuple[int, Key], ...]
"""Pairs of a lane and the step that it takes."""


class Branches:
    """The graphs that take steps of several lanes at once.

    :param lanes: the captured steps of each lane. All of them use the same recorder.
    """

    def __init__(self, lanes: Sequence[StepGraphs]) -> None:
        self._lanes = lanes
        self._graphs: dict[Combination, LaunchBranches | str] = {}

    def alone(self, lane: int, step: PlannedStep) -> None:
        """Take a step of one lane."""
        with step.stream.running():
            self._lanes[lane].take_step(step.batch)

    def together(self, steps: Mapping[int, PlannedStep]) -> set[int]:
        """Take the steps that one graph can take; return their lanes.

        :param steps: the next step of each lane.
        """
        ready: dict[int, Captured] = {}
        keys: list[tuple[int, Key]] = []
        for lane, step in steps.items():
            key, captured = self._lanes[lane].find(step.batch)
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
                steps[lane].batch.session.losses.count(captured.losses)
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
        counts = [dict(step.batch.session.losses.counts) for step, _ in steps]
        branches, streams = [], [step.stream for step, _ in steps]
        for step, captured in steps:
            captured.batch.copy_(step.batch.picked)
            step.batch.session.optimizer.zero_grad()
            branches.append(partial(take_step, replace(step.batch, picked=captured.batch)))
        try:
            launch = self._lanes[0].recorder.record_branches(branches, streams)
        except (RuntimeError, PluginCallError) as error:
            for (step, _), before in zip(steps, counts, strict=True):
                step.batch.session.losses.counts = before
                step.batch.session.optimizer.zero_grad()
            reason = str(error).partition("\n")[0]
            warnings.warn(f"steps cannot be branches of one graph: {reason}", CaptureWarning, stacklevel=2)
            return REFUSED
        launch(streams)
        return launch
