"""A plugin that sends an engine every kind of task; the result's bits show whether all arrived."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Exchange,
    Loss,
    Plugin,
    PluginOptions,
    ServerContext,
    Step,
    hookimpl,
    question,
)
from fedcore_functional import proximal_term


class ProbeOptions(PluginOptions):
    """Options of the probe."""

    raising: list[int] = Field(default=[], description="Clients that raise when they train, or are asked to.")


class Probe(Plugin[ProbeOptions]):
    """Pauses its clients to exchange classifiers, keeps states, sends payloads down and up, and asks questions."""

    exchanges = Exchange(("classifier.*",), lambda epochs: {epochs - 1} - {0})  # before the last epoch

    @hookimpl
    def broadcast(self, server: ServerContext) -> Mapping[str, Tensor]:
        """Send the numbers that the last round's clients drew."""
        return {"number": server.state.get("drawn", torch.zeros(()))}

    @hookimpl
    def mid_local_epoch(
        self, server: ServerContext, snapshots: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[int, Mapping[str, Tensor]]:
        """Give each client the next one's classifier."""
        clients = sorted(snapshots)
        return dict(zip(clients, (snapshots[client] for client in [*clients[1:], *clients[:1]]), strict=True))

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add up the clients' draws."""
        server.state["drawn"] = server.state.get("drawn", torch.zeros(())) + update.payload["drawn"]

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Ask every client."""
        sent = {"x": torch.arange(3.0)}
        for answer in server.ask("all", self.answer, tensors=sent):
            server.state[f"answer-{answer.client}"] = answer.tensors["answer"]

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Count participations, or fail."""
        if client.id in self.options.raising:
            raise RuntimeError(f"client {client.id} fails, as it should")
        client.state["seen"] = client.state.get("seen", 0) + 1

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Pull the weights by the state and the broadcast, so that both show in their bits."""
        pull = (1 + step.client.state["seen"] + step.client.received["number"]) / 100
        return Loss(pull * proximal_term(step.parameters, step.reference))

    @hookimpl
    def end_local(self, client: ClientContext) -> Mapping[str, Tensor]:
        """Send up a random number from the client's stream."""
        return {"drawn": torch.rand((), generator=client.generator("probe"))}

    @question
    def fails(self, client: ClientContext, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Answer, or fail where ``raising`` names the client."""
        if client.id in self.options.raising:
            raise RuntimeError(f"client {client.id} fails, as it should")
        return self.answer(client, tensors)

    @question
    def answer(self, client: ClientContext, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the question's tensors and a sum that identifies client and shared payload."""
        return {**tensors, "answer": tensors["x"] + 1000 * client.id + client.received.get("number", torch.zeros(()))}


class ProbeOfEach(Plugin):
    """Sends every client a different tensor, and keeps it there."""

    @hookimpl
    def broadcast_to(self, server: ServerContext, client: int) -> Mapping[str, Tensor]:
        """Send the client's id and the round, client + 1 times."""
        return {"own": torch.full((client + 1,), 100.0 * client + server.round)}

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Keep the tensor that arrived."""
        client.state["own"] = client.received.get("own", torch.zeros(0))
