"""The exchange of class prototypes in every round. FedProc and FedECCR share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from fedcore import (
    Answer,
    ClientContext,
    ClientUpdate,
    ModelTask,
    Plugin,
    ServerContext,
    SplitModel,
    Tensors,
    hookimpl,
    question,
)
from fedcore_functional.bounds import UNKNOWN, FeatureOptions, FeatureRange
from fedcore_functional.contrast import ReadyPrototypes, ready_prototypes
from fedcore_functional.prototypes import (
    Weights,
    add_prototypes,
    check_prototypes,
    class_prototypes,
    first_prototypes,
    mean_over_holders,
    random_prototypes,
)


class PrototypeOptions(FeatureOptions):
    """Options of a method that contrasts features with global prototypes."""

    first_round: Literal["contrast", "task"] = Field(
        default="task",
        description="task: round 0 is cross-entropy alone, and its trained models give the first prototypes. contrast: "
        "round 0 contrasts with the prototypes that init chooses.",
    )
    init: Literal["query", "random"] = Field(
        default="query",
        description="First prototypes for first_round=contrast. query: the cohort's means under the initial weights. "
        "random: unit vectors drawn from the seed.",
    )
    prototype_weights: Weights = Field(
        default="samples",
        description="A global prototype is the mean over all samples of the class, or over the means of the clients "
        "that hold it.",
    )
    projection: bool = Field(default=True, description="Put the projection head (256 wide) on the encoder.")

    @model_validator(mode="after")
    def _init_is_used(self) -> PrototypeOptions:
        if self.first_round == "task" and self.init != "query":
            raise ValueError(
                f"init={self.init} says what first_round=contrast starts from; give both, or leave init out"
            )
        return self


class PrototypeExchange(Plugin[PrototypeOptions]):
    """A part of a plugin: the exchange of global prototypes in every round.

    The server keeps ``prototypes`` and ``known`` in ``server.state``. A client keeps the prototypes of one round in
    ``client.scratch``, and :meth:`ready` returns them. Until prototypes exist nothing is broadcast, and :meth:`ready`
    returns None.

    :param temperature: of the contrast.
    :param within: the range of the features, outside of which a client's prototypes are refused.
    :param contrasts: tells whether a round uses prototypes. Without use there is no exchange.
    """

    assumes = ("one-model", "classes")

    def __init__(
        self,
        options: PrototypeOptions | None = None,
        *,
        temperature: float = 1.0,
        within: FeatureRange = UNKNOWN,
        contrasts: Callable[[ClientContext | ServerContext], bool] = lambda at: True,
    ) -> None:
        super().__init__(options)
        self.temperature, self.contrasts = temperature, contrasts
        self.within = self.options.narrowed(within)

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Add the projection head, so that the contrast is on projected features."""
        if self.options.projection:
            task.ensure_projection(model)

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Initialize the prototypes if the first round has a contrast. A round that did not commit does it again.

        :raises RoundFailedError: no client of the cohort answered.
        """
        if not self.contrasts(server) or self.options.first_round == "task" or "prototypes" in server.state:
            return
        if self.options.init == "random":
            first = random_prototypes(server.num_classes, server.feature_dim, server.generator("prototypes"))
        else:

            def check(answer: Answer) -> None:
                self._check(server, answer.tensors, int(server.client_sizes[answer.client]))

            first = first_prototypes(server.ask("cohort", self.own, check=check))
        server.state.update(first)

    @hookimpl
    def broadcast(self, server: ServerContext) -> Tensors | None:
        """Send the global ``prototypes`` (C, d) and ``known`` (C,), once they exist."""
        if not self.contrasts(server) or "prototypes" not in server.state:
            return None
        return {"prototypes": server.state["prototypes"], "known": server.state["known"]}

    @hookimpl
    def accumulate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> None:
        """Add clients' prototypes to this round's sums.

        :raises ValueError: the prototypes are malformed. The client is left out.
        """
        if not self.contrasts(server):
            return
        for update in updates:
            self._check(server, update.payload, update.samples)
        server.state.update(add_prototypes(server.state, *(update.payload for update in updates)))

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Update the global prototypes from this round's sums, if clients sent prototypes."""
        if "sums" in server.state:
            total = {name: server.state.pop(name) for name in ("sums", "weights")}
            previous = server.state if "prototypes" in server.state else None
            server.state.update(mean_over_holders(total, previous))

    def _check(self, server: ServerContext, sent: Tensors, samples: int) -> None:
        width, weights = server.feature_dim, self.options.prototype_weights
        check_prototypes(sent, server.num_classes, width, weights=weights, samples=samples, within=self.within)

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Make the received prototypes ready for all batches of the round."""
        if client.received:
            client.scratch["prototypes"] = ready_prototypes(
                client.received["prototypes"], temperature=self.temperature, known=client.received["known"]
            )

    @staticmethod
    def ready(client: ClientContext) -> ReadyPrototypes | None:
        """Return the prototypes to contrast with; None in a round without prototypes."""
        ready: ReadyPrototypes | None = client.scratch.get("prototypes")
        return ready

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors | None:
        """Send the prototypes of the trained model."""
        return self.own(client) if self.contrasts(client) else None

    @question
    def own(self, client: ClientContext) -> Tensors:
        """Return the client's prototypes under its current weights, over all its training samples in eval mode."""
        features, _, labels = client.forward()
        return class_prototypes(features, labels, client.num_classes, weights=self.options.prototype_weights)
