"""How the optimizer steps of clients' trainings are taken: one by one, or by a runner of a package."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.seeding import random_stream
from fedcore.client.context import Batch
from fedcore.client.loop import take_step
from fedcore.client.messages import ClientTask, Outcome, SharedPayload
from fedcore.client.setup import Setup
from fedcore.client.working_model import WorkingModel
from fedcore.data import Dataset

Training: TypeAlias = Generator[Batch, None, Outcome]
"""A client's training. It yields each batch, whose step is to be taken before the training goes on."""


@dataclass(frozen=True)
class Begin:
    """Begins the work on a task with a working model. A training that goes on after a pause keeps the one that it had.

    A runner may also do the work of several tasks at once, with the runtime and what all of them received.
    """

    runtime: Any
    """The :class:`fedcore.client.runtime.ClientRuntime` of the tasks."""
    shared: SharedPayload | None

    def __call__(self, task: ClientTask, working: WorkingModel) -> Training:
        """Return the training of a task."""
        training: Training = self.runtime.training(self.shared, task, working)
        return training


TakeStep = Callable[[Batch], None]

T = TypeVar("T")


class Runner(Protocol):
    """Takes the steps of trainings that came together.

    What a step does is the core's business; how many are taken at once, and by what machinery, is not.
    """

    together: int
    """The number of trainings that an engine hands over at a time."""

    def working(self, setup: Setup) -> WorkingModel:
        """Return the working model of a runtime. It is asked for once, before any training."""

    def run(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome]:
        """Work on tasks of one runtime, which came together; return their outcomes in the same order.

        An exception of a step is thrown into its training, which makes a failure of it. Trainings that are under way at
        the same time need a working model each.

        :raises FedcoreError: a contract or the run directory is broken.
        """


class OneByOne:
    """Takes the steps of one training after the other."""

    together = 1

    def working(self, setup: Setup) -> WorkingModel:
        """Return the only working model."""
        self._working = WorkingModel(setup)
        return self._working

    def run(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome]:
        """Take all steps; see :class:`Runner`."""
        return [drain(begin(task, self._working), take_step) for task in tasks]


def drain(training: Generator[Batch, None, T], take: TakeStep) -> T:
    """Take all steps of a training; return its result.

    :param take: takes one step.
    """
    try:
        batch = next(training)
        while True:
            error = _take_epoch(training, batch, take)
            try:
                batch = next(training) if error is None else training.throw(error)
            finally:
                del error  # its traceback leads to this frame
    except StopIteration as ended:
        result: T = ended.value
        return result


def _take_epoch(training: Iterator[Batch], batch: Batch, take: TakeStep) -> Exception | None:
    """Take the steps of a local epoch from its first batch on; return the exception of a step that raised."""
    with random_stream(batch.epoch_seed, batch.session.working.device):
        while True:
            try:
                take(batch)
            except Exception as error:  # hooks can raise anything
                return error
            if batch.last:
                return None
            batch = next(training)


def runner_of(config: RunConfig, dataset: Dataset) -> Runner:
    """Return the runner for a configuration: the first that an installed package offers for it, else one by one."""
    for name in registry.available("runner"):
        runner: Runner | None = registry.resolve("runner", name)(config, dataset)
        if runner is not None:
            return runner
    return OneByOne()
