"""A plugin that finds clients whose training does not begin where ``server.staleness`` says."""

from __future__ import annotations

import torch

from fedcore import ClientContext, ClientUpdate, Plugin, ServerContext, Tensors, hookimpl


class StartWatch(Plugin):
    """Keeps the model of every round on the server, and lets clients send the weights that they began with."""

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Keep w_t."""
        server.state.update({f"{server.round}:{name}": server.model[name] for name in server.trainable})

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors:
        """Send what the training began with."""
        return client.start

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Refuse an update that began with another model than that of as many steps ago."""
        stale = server.staleness[update.client]
        begun = server.round - stale
        for name, tensor in update.payload.items():
            if not torch.equal(tensor, server.state[f"{begun}:{name}"]):
                raise AssertionError(
                    f"client {update.client} got its model {stale} server steps ago, but did not begin with {name!r} "
                    f"of round {begun}"
                )
