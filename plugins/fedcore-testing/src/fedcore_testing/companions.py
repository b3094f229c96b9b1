"""Plugins that run next to the plugin under test and fail if it breaks a rule. They do not change the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Plugin, ServerContext, Tensors, hookimpl


class Bystander(Plugin):
    """Counts participations in its states, and sends the count up and down."""

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send the number of updates so far."""
        return {"updates": torch.tensor(float(server.state.get("updates", 0)))}

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Find what was sent, and only that."""
        _require(set(client.received) == {"updates"}, "client.received", client.received)
        _require(set(client.state) <= {"rounds"}, "client.state", client.state)
        _require(not client.scratch, "client.scratch", client.scratch)
        client.scratch["seen"] = True

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Count this participation."""
        _require(set(client.scratch) == {"seen"}, "client.scratch", client.scratch)
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        return {"rounds": torch.tensor(float(client.state["rounds"]))}

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Find what was sent, and only that."""
        _require(set(update.payload) == {"rounds"}, "update.payload", update.payload)
        _require(set(server.state) <= {"updates"}, "server.state", server.state)
        server.state["updates"] = server.state.get("updates", 0) + 1


def _require(kept: bool, where: str, result: Mapping[str, object]) -> None:
    if not kept:
        raise AssertionError(f"{where} of another plugin was changed: it holds {sorted(result)}")


class StartWatch(Plugin):
    """Keeps the model of every round on the server, and lets clients send the weights that they began with."""

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Keep w_t."""
        server.state.update({f"{server.round}:{name}": server.model[name] for name in server.trainable})

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors:
        """Send the weights that the training began with."""
        return client.start

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Refuse an update that began with another model than the model of so many steps ago."""
        stale = server.staleness[update.client]
        begun = server.round - stale
        for name, tensor in update.payload.items():
            if not torch.equal(tensor, server.state[f"{begun}:{name}"]):
                raise AssertionError(
                    f"client {update.client} got its model {stale} server steps ago, but did not begin with {name!r} "
                    f"of round {begun}"
                )
