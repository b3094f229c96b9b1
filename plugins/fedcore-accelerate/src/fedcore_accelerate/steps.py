"""The steps of a training, for runners that take steps of several trainings in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedcore import ClientUpdate
from fedcore.client import Batch, LocalSession, Training
from fedcore.engines import Outcome
from fedcore_accelerate.random_stream import RandomStream


@dataclass(frozen=True)
class PlannedStep:
    """An optimizer step that waits to be taken."""

    batch: Batch
    stream: RandomStream
    """The random numbers of the epoch, which wait between its steps."""


class Steps:
    """A training and its next step."""

    step: PlannedStep
    outcome: Outcome
    """The outcome of the training, once it has ended."""

    def __init__(self, asked: int, training: Training) -> None:
        self.asked, self._training = asked, training
        """The number of the task among those that came together, and its training."""

    @property
    def session(self) -> LocalSession:
        """The session of the next step's client."""
        return self.step.batch.session

    def advance(self, error: Exception | None = None) -> bool:
        """Ask for the next step; return whether there is one.

        :param error: the exception of the last step, if it raised.
        :raises FedcoreError: a contract or the run directory is broken.
        """
        try:
            batch = next(self._training) if error is None else self._training.throw(error)
        except StopIteration as ended:
            self.outcome = ended.value
            return False
        before = getattr(self, "step", None)
        if before is not None and before.batch.epoch == batch.epoch:
            stream = before.stream
        else:
            stream = RandomStream(batch.epoch_seed, batch.session.working.device)
        self.step = PlannedStep(batch, stream)
        return True


def with_share_of_time(outcome: Outcome, clients: int) -> Outcome:
    """Return an update with the client's share of the seconds in which so many clients have trained at once."""
    if not isinstance(outcome, ClientUpdate):
        return outcome
    spent = {name: seconds / clients for name, seconds in outcome.plugin_seconds.items()}
    return replace(outcome, seconds=outcome.seconds / clients, plugin_seconds=spent)
