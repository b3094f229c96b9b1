"""The plugin: the server keeps the clients' models and mixes one for each client, to which it is pulled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    Plugin,
    PluginOptions,
    ServerContext,
    Step,
    Tensors,
    check_tensors,
    hookimpl,
)
from fedcore.models import Layout
from fedcore_fedamp import equations as eq
from fedcore_functional import proximal_term

CLIENTS = "clients"
"""The clients whose models the server has, in ascending order."""


class FedAMPOptions(PluginOptions):
    """Options of FedAMP."""

    lambda_: float = Field(
        default=1.0, ge=0, alias="lambda", description="lambda: strength of the collaboration; 0 is local training."
    )
    alpha: float = Field(
        default=1.0, gt=0, description="alpha_k: step of the message passing; the pull is lambda / alpha_k."
    )
    sigma: float = Field(default=10.0, gt=0, description="sigma of A(x) = 1 - exp(-x / sigma), or the cosine's scale.")
    attention: Literal["distance", "cosine"] = Field(
        default="distance", description="xi by the distance of models (FedAMP), or by their cosine (HeurFedAMP)."
    )
    self_weight: float = Field(default=0.5, ge=0, lt=1, description="xi_ii of HeurFedAMP: a client's own share of u_i.")


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
        return eq.mixture(own, others, self.shares(own, others))

    def shares(self, own: Tensors, others: Sequence[Tensors]) -> list[float]:
        """Return the xi_ij of these models, by their distances or by their cosines."""
        options = self.options
        if options.attention == "cosine":
            return eq.cosine_attention([eq.cosine(own, w) for w in others], options.sigma, options.self_weight)
        return eq.attention([eq.squared_distance(own, w) for w in others], options.alpha, options.sigma)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix the parameters that are pulled, u_i, and what is the same on all clients for ever."""
        mixed = client.network(client.received)
        client.scratch["parameters"] = [w for w in client.model.parameters() if w.requires_grad]
        client.scratch["pull"] = [u.detach() for u in mixed.parameters() if u.requires_grad]
        client.scratch["fixed"] = Layout.of(client.model).fixed

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add lambda / (2 alpha) |w_i - u_i|^2."""
        scratch, weight = step.client.scratch, self.options.lambda_ / self.options.alpha
        pull = partial(proximal_term, scratch["parameters"], scratch["pull"])
        return Loss(pull, weight=weight, name="attentive")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send w_i: parameters and floating buffers, without those that nobody trains."""
        own, fixed = client.model.state_dict(), client.scratch["fixed"]
        return {name: w.detach() for name, w in own.items() if w.is_floating_point() and name not in fixed}

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
    """Return shape and dtype of each tensor that a client sends, the floating ones that it keeps, by name."""
    kept = {name: server.model[name] for name in server.personal}
    return {name: (tuple(w.shape), w.dtype) for name, w in kept.items() if w.is_floating_point()}
