"""The engines of this process: one client or stack after the other, or several clients side by side on one GPU.

Side by side, every client trains in a lane. A lane has a client runtime of its own, as a worker process has, so clients
share nothing but the data set. All lanes move in lockstep. Each lane plans its next step. One launch takes all steps
that a graph holds. The other steps are taken one after the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from fedcore.client.branches import Branches
from fedcore.client.loop import PlannedStep
from fedcore.client.messages import ClientSite, ClientTask, Outcome, Pair, SharedPayload
from fedcore.client.runtime import ClientRuntime
from fedcore.client.stack_runner import handler
from fedcore.engines.dispatch import Bundle, Dispatcher, stacked


class InProcessEngine:
    """Runs every task or stack in this process, one by one. Updates stay on the device if no plugin reads them."""

    workers = 1

    def __init__(self, site: ClientSite) -> None:
        self._runtime = ClientRuntime(site)
        self._runtimes = [self._runtime]
        self._runtime.keep_updates_on_device()
        self._handle, self._stack = handler(self._runtime), site.config.stack_size
        self._shared: dict[str, SharedPayload] = {}

    def share(self, key: str, payload: SharedPayload) -> None:
        """Keep a copy of a payload under a key, on the device."""
        self._shared[key] = payload.copy_to(self._runtime.placement)

    def unshare(self, key: str) -> None:
        """Drop a payload."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks one by one, or stack by stack."""
        for task in stacked(tasks, self._stack):
            together = task.tasks if isinstance(task, Bundle) else (task,)
            outcomes = self._handle([each.complete() for each in together], self._shared.get(task.shared or ""))
            yield from zip(together, outcomes, strict=True)

    def own_model(self, task: ClientTask) -> nn.Module:
        """Return a copy of the client's own model, as an evaluation by this task would use it; it is on the device."""
        return self._runtime.of(task.client).own_model(task.complete(), self._shared.get(task.shared or ""))

    def close(self) -> None:
        """Drop the shared payloads and the paused clients."""
        self._shared.clear()
        for runtime in self._runtimes:
            runtime.close()


class Lane:
    """One client runtime and the task that it works on, step by step."""

    ready = True

    def __init__(self, runtime: ClientRuntime, shared: Mapping[str, SharedPayload]) -> None:
        self.runtime, self._shared = runtime, shared
        self.task: ClientTask | None = None
        # The optimizer step that is to be taken next; None before the first and after the last one.
        self.step: PlannedStep | None = None
        self._steps: Generator[PlannedStep, None, Outcome]

    def start(self, task: ClientTask) -> None:
        """Accept a task. Its work begins with :meth:`advance`."""
        self.task = task
        self._steps = self.runtime.steps(task.complete(), self._shared.get(task.shared or ""))

    def advance(self, error: Exception | None = None) -> Outcome | None:
        """Plan the next step. Return the outcome if the task has no further step, else None.

        :param error: the exception of the last step, if it raised.
        :raises FedcoreError: a contract or the run directory is broken.
        """
        self.step = None
        try:
            self.step = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration as ended:
            outcome: Outcome = ended.value
            return outcome
        except BaseException:
            self.task = None
            raise
        return None


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
            runtimes[-1].keep_updates_on_device()
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
        """Plan a lane's next step. Return whether its task has ended."""
        outcome = lane.advance(error)
        if outcome is None:
            return False
        self._dispatcher.finish(lane, outcome)
        return True
