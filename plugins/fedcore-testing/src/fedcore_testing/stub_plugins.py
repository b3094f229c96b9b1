"""Stub plugins to combine with a plugin under test: each implements one behaviour of methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedcore import (
    ClientContext,
    ClientUpdate,
    Exchange,
    Plugin,
    PluginOptions,
    RejectUpdate,
    ServerContext,
    Step,
    Tensors,
    hookimpl,
)


class CohortsOptions(PluginOptions):
    """Options of Cohorts."""

    rounds: list[list[int]] = Field(default_factory=list, description="The clients of every round, in this order.")


class Cohorts(Plugin[CohortsOptions]):
    """Prescribes the clients of every round."""

    @hookimpl
    def select_clients(self, server: ServerContext) -> list[int]:
        """Return the round's clients."""
        return self.options.rounds[server.round]


class EqualWeights(Plugin):
    """Weights all clients equally."""

    @hookimpl
    def weight(self) -> float:
        """Return 1."""
        return 1.0


class RejectsClient1(Plugin):
    """Rejects the update of client 1 in every round."""

    @hookimpl
    def pre_aggregate(self, update: ClientUpdate) -> None:
        """Reject the update if it is of client 1."""
        if update.client == 1:
            raise RejectUpdate("not this one")


class RejectsRound1(Plugin):
    """Rejects all updates of the second round."""

    @hookimpl
    def pre_aggregate(self, server: ServerContext) -> None:
        """Reject an update of round 1."""
        if server.round == 1:
            raise RejectUpdate("not in the second round")


class PersonalClassifier(Plugin):
    """Keeps the classifier on each client."""

    @hookimpl
    def personal_parameters(self) -> list[str]:
        """Return the classifier's names."""
        return ["classifier.*"]


class PersonalModel(Plugin):
    """Keeps everything on each client."""

    @hookimpl
    def personal_parameters(self) -> list[str]:
        """Return all names."""
        return ["*"]


class FrozenEncoder(Plugin):
    """Keeps the encoder fixed from round 1 on; placed after a method, whose ``begin_local`` does not know of it."""

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Freeze it."""
        if client.round > 0:
            client.freeze(["encoder.*"])


class ExchangesClassifier(Plugin):
    """Declares that clients exchange their classifiers."""

    exchanges = Exchange(("classifier.*",), lambda epochs: ())

    @hookimpl
    def mid_local_epoch(self) -> None:
        """Patch no client."""


class OwnsClassifier(Plugin):
    """Declares that it aggregates the classifier, and returns the mean."""

    owns = ("classifier.*",)

    @hookimpl
    def aggregate(self, server: ServerContext) -> None:
        """Leave the mean."""


class OwnTaskLoss(Plugin):
    """Implements the task's loss, as the cross-entropy that it is without."""

    @hookimpl
    def task_loss(self, step: Step) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(step.logits, step.y)


class CorrectsClassifier(Plugin):
    """Declares that it corrects the classifier after the last round."""

    corrects = ("classifier.*",)

    @hookimpl
    def post_train(self) -> None:
        """Correct nothing."""


class PrefersClass0(Plugin):
    """Adds 8 to the bias of class 0 after every round, as training on skewed data might."""

    owns = ("classifier.bias",)

    @hookimpl
    def aggregate(self, updates: Sequence[ClientUpdate]) -> Tensors:
        """Return the plain mean of the biases, and 8 more for class 0."""
        bias = torch.stack([update.model["classifier.bias"] for update in updates]).mean(dim=0)
        bias[0] += 8.0
        return {"classifier.bias": bias}


class TakesSecondPasses(Plugin):
    """Takes each pass of the local training twice and drops the second."""

    @hookimpl
    def gradients(self, step: Step) -> None:
        """Take a pass at the same weights, and leave the gradients as they are."""
        step.gradients_at({})


class StepsOnServer(Plugin):
    """Declares that it steps the whole model on the server, and takes the mean."""

    server_optimizer = True

    @hookimpl
    def server_step(self, mean: dict[str, Tensor]) -> None:
        """Take the mean."""
