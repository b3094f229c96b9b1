"""FedDyn as a fedcore plugin: a dynamic regularizer aligns the clients' optima with the global one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Loss, Plugin, PluginOptions, ServerContext, Step, hookimpl
from fedcore_functional import (
    displaced_mean,
    proximal_term,
    renewed_displacement,
    renewed_mean_displacement,
    shifted_target,
)

__all__ = ["FedDyn", "FedDynOptions", "client_alpha"]


class FedDynOptions(PluginOptions):
    """Options of FedDyn."""

    alpha: float = Field(default=0.01, gt=0, description="alpha of Eq. 1: strength of the dynamic regularizer.")
    weighting: Literal["uniform", "samples"] = Field(
        default="samples",
        description="How clients' losses count: by samples n_i (alpha / (n_i / mean n)), or all the same.",
    )


class FedDyn(Plugin[FedDynOptions]):
    """FedDyn (Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, ICLR 2021, arXiv 2111.04263).

    Clients minimise F_i(w) - <g_i, w> + alpha/2 |w - w_t|^2 (Eq. 1); the server adds to the mean of their models
    the mean of what all clients, sampled or not, have been displaced so far (-h / alpha).

    The paper keeps g_i, the gradient of the client's loss at its last solution, and h, the mean over all g_i. As in the
    authors' code, the state is lambda_i = -g_i / alpha and the mean -h / alpha: displacements of weights, in which
    alpha does not occur, so that a small alpha divides nothing.
    """

    server_optimizer = True
    assumes = ("displacement",)

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix alpha_i and the point w_t - lambda_i for the round."""
        mean_samples = client.received.get("mean_samples")
        client.scratch["alpha"] = client_alpha(
            self.options.alpha, client.n, None if mean_samples is None else float(mean_samples)
        )
        start = client.start
        client.scratch["target"] = {
            p: shifted_target(start[name], client.state.get(name)) for name, p in client.parameters.items()
        }

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add alpha_i/2 |w - (w_t - lambda_i)|^2 (Eq. 1) over the shared parameters in training."""
        scratch = step.client.scratch
        pull = partial(proximal_term, step.parameters, [scratch["target"][p] for p in step.parameters])
        return Loss(pull, weight=scratch["alpha"], name="dynamic")

    @hookimpl
    def end_local(self, client: ClientContext) -> None:
        """Renew lambda_i."""
        start = client.start
        for name, y in client.parameters.items():
            client.state[name] = renewed_displacement(client.state.get(name), start[name], y.detach())

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send mean n over all clients, of which alpha_i is made; nothing with one alpha for all."""
        if self.options.weighting == "uniform":
            return {}
        return {"mean_samples": server.client_sizes.double().mean()}

    @hookimpl
    def weight(self) -> float:
        """Take the plain mean of the models (Algorithm 1)."""
        return 1.0

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renew the mean of all lambda_i and add it to the mean of the models; what no client trained stays."""
        new, share = {}, len(server.accepted) / server.num_clients
        for name, m in mean.items():
            if name in server.frozen:
                continue  # the mean of earlier displacements would carry it away
            before = server.state.get(name, torch.zeros_like(m, dtype=torch.float64))
            after = renewed_mean_displacement(before, server.model[name], m, share)
            server.state[name], new[name] = after, displaced_mean(m, after)
        return new


def client_alpha(alpha: float, samples: int, mean_samples: float | None) -> float:
    """Return alpha_i = alpha / (n_i / mean n): the clients' losses count by their samples then.

    At a fixed point alpha_i lambda_i = -grad F_i and the lambda_i have mean 0, so that the sum of n_i grad F_i is 0;
    with one alpha for all it is the sum of grad F_i.

    :param samples: n_i; ``mean_samples`` mean n over all clients, None for one alpha for all.
    :source: the authors' code; the paper has alpha.
    """
    return alpha if mean_samples is None else alpha * (mean_samples / samples)
