"""The plugin: what the server keeps and mixes, and what a client is pulled to."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    Plugin,
    ServerContext,
    Step,
    Tensors,
    check_tensors,
    hookimpl,
)
from fedcore_fedamp import equations as eq
from fedcore_fedamp.options import FedAMPOptions
from fedcore_functional import proximal_term

CLIENTS = "clients"
"""The clients whose models the server has, in ascending order."""


class FedAMP(Plugin[FedAMPOptions]):
    """FedAMP (Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021, arXiv 2007.03797).

    Every client keeps a model w_i. The server mixes u_i = sum_j xi_ij w_j, more of those that resemble w_i, and client
    i minimises F_i(w_i) + lambda / (2 alpha) |w_i - u_i|^2 from its w_i on (Algorithm 1). There is no global model.
    """

    @hookimpl
    def personal_parameters(self) -> list[str]:
        """Keep the whole model, buffers included, on each client."""
        return ["*"]

    @hookimpl
    def broadcast_to(self, server: ServerContext, client: int) -> Tensors | None:
        """Send u_i to a client that trains; nothing before it took part, when w_i = u_i = w_0."""
        known = server.state.get(CLIENTS, [])
        if client not in known or client not in server.cohort:
            return None
        models = {j: {name: server.state[f"{j}:{name}"] for name in _shapes(server)} for j in known}
        own = models.pop(client)
        others = list(models.values())
        return eq.mixture(own, others, eq.shares_of(own, others, self.options))

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix the parameters that are pulled, and u_i."""
        mixed = client.network(client.received)
        client.scratch["parameters"] = [w for w in client.model.parameters() if w.requires_grad]
        client.scratch["pull"] = [u.detach() for u in mixed.parameters() if u.requires_grad]

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Add lambda / (2 alpha) |w_i - u_i|^2."""
        if self.options.lambda_ == 0:
            return None
        scratch, weight = step.client.scratch, self.options.lambda_ / self.options.alpha
        return Loss(proximal_term(scratch["parameters"], scratch["pull"]), weight=weight, name="attentive")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send w_i: parameters and floating buffers."""
        return {name: w.detach() for name, w in client.model.state_dict().items() if w.is_floating_point()}

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Keep w_i in place of the client's earlier model."""
        check_tensors(update.payload, _shapes(server))
        server.state.update({f"{update.client}:{name}": w for name, w in update.payload.items()})

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Note who has a model here; once per round, as reading the list takes O(N)."""
        server.state[CLIENTS] = sorted({*server.state.get(CLIENTS, []), *server.accepted})


def _shapes(server: ServerContext) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Return what a client sends, by name: shape and dtype of the model's floating tensors."""
    return {n: (tuple(w.shape), w.dtype) for n, w in server.model.items() if w.is_floating_point()}
