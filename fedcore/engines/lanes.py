"""The engine of ``--lanes``: several clients side by side on one GPU, in this process.

Every client trains in a lane. A lane has a client runtime of its own, as a worker process has, so clients share nothing
but the data set. All lanes move in lockstep: each lane plans its next step, and one launch takes the steps of several
lanes.

Steps that a graph takes for any client (:class:`fedcore.client.captured_steps.StepGraphs`) write to the memory of their
lane only. Steps of several lanes can therefore run side by side: they are recorded once more, each as a branch of one
graph. Steps that read their client, or that cannot be captured, are taken one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedcore.base.errors import PluginCallError
from fedcore.client.captured_steps import REFUSED, SEEN, Captured, CaptureWarning, Key, StepGraphs
from fedcore.client.loop import PlannedStep, take_step
from fedcore.client.messages import ClientSite, ClientTask, Outcome, Pair, SharedPayload
from fedcore.client.recorder import LaunchBranches
from fedcore.client.runtime import ClientRuntime
from fedcore.client.session import LocalSession
from fedcore.engines.dispatch import Dispatcher
from fedcore.engines.in_process import InProcessEngine

MOST_GRAPHS = 32
"""The number of combinations of steps that are kept as graphs. Clients of different sizes could make any number."""


class LanesEngine(InProcessEngine):
    """Runs the tasks of several clients side by side in this process.

    :param lanes: how many clients; each has a model and captured steps of its own on the device.
    """

    def __init__(self, site: ClientSite, lanes: int) -> None:
        super().__init__(site)
        self.workers = lanes
        first, runtimes = self._runtime, self._runtimes
        assert first.graphs is not None
        for _ in range(lanes - 1):
            runtimes.append(ClientRuntime(replace(site, dataset=first.dataset), first.graphs.recorder))
        self._dispatcher = Dispatcher([Lane(runtime, self._shared) for runtime in runtimes])
        self._branches = Branches([runtime.graphs for runtime in runtimes if runtime.graphs])

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks side by side and yield each as it finishes."""
        yield from self._dispatcher.run(tasks, self._collect, window=window)

    def _collect(self) -> None:
        """Take steps of all lanes until a task ends."""
        lanes = self._dispatcher.workers
        with self._runtime.recording():
            ended = [self._advance(lane) for lane in lanes if lane.task is not None and lane.step is None]
            while not any(ended):
                planned = {index: lane.step for index, lane in enumerate(lanes) if lane.step is not None}
                taken = self._branches.together(planned)
                for index, step in planned.items():
                    error = None
                    if index not in taken:
                        try:
                            self._branches.alone(index, step)
                        except Exception as raised:
                            error = raised
                    ended.append(self._advance(lanes[index], error))

    def _advance(self, lane: Lane, error: Exception | None = None) -> bool:
        """Plan a lane's next step. Return whether its task has ended.

        :param error: the exception of the last step, if it raised.
        :raises FedcoreError: a contract or the run directory is broken.
        """
        lane.step = None
        try:
            lane.step = next(lane.steps) if error is None else lane.steps.throw(error)
        except StopIteration as ended:
            self._dispatcher.finish(lane, ended.value)
        except BaseException:
            lane.task = None
            raise
        return lane.step is None


class Lane:
    """One client runtime and the task that it works on, step by step."""

    ready = True

    def __init__(self, runtime: ClientRuntime, shared: Mapping[str, SharedPayload]) -> None:
        self.runtime, self._shared = runtime, shared
        self.task: ClientTask | None = None
        # The optimizer step that is to be taken next; None before the first and after the last one.
        self.step: PlannedStep | None = None
        self.steps: Generator[PlannedStep, None, Outcome]

    def start(self, task: ClientTask) -> None:
        """Accept a task. Its work begins when the engine asks for its first step."""
        self.task = task
        self.steps = self.runtime.steps(task.complete(), self._shared.get(task.shared or ""))


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
