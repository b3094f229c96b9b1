"""FedAvg (McMahan et al., AISTATS 2017, arXiv 1602.05629): the default of each hook that needs a result.

It is a file of its own because it is a plugin like any other, behind an entry point of the group ``fedcore.plugins``.
Other methods replace its results through hooks.
"""

from __future__ import annotations

from torch import Tensor

from fedcore.base.seeding import choose
from fedcore.base.types import ClientUpdate
from fedcore.hooks.contexts import ServerContext, Step
from fedcore.hooks.hookspecs import hookimpl
from fedcore.hooks.plugin import Plugin


class FedAvg(Plugin):
    """Uniform cohorts, the task's loss on each client, and the mean of the clients' models weighted by samples."""

    neutral = {}

    @hookimpl(trylast=True)
    def select_clients(self, server: ServerContext) -> list[int]:
        """Draw the cohort uniformly without replacement from the clients that are available."""
        clients = server.available
        count = min(server.config.cohort_size, len(clients))
        return sorted(clients[place] for place in choose(len(clients), count, server.generator("cohort")))

    @hookimpl(trylast=True)
    def task_loss(self, step: Step) -> Tensor:
        """Return the task's mean loss of the batch, cross-entropy for classes."""
        return step.task.loss(step.logits, step.y)

    @hookimpl(trylast=True)
    def weight(self, update: ClientUpdate) -> float:
        """Weigh by the number of samples, n_k."""
        return float(update.samples)
