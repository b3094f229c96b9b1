"""FedDC as a fedcore plugin: local drift is tracked on the clients and corrected on the server."""

from __future__ import annotations

from collections.abc import Mapping
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
    check_changes,
    hookimpl,
)
from fedcore_functional import (
    correction,
    displaced_mean,
    linear_term,
    proximal_term,
    renewed_control,
    renewed_displacement,
    renewed_mean_displacement,
    shifted_target,
)

__all__ = ["FedDC", "FedDCOptions", "client_weight"]


MEAN_SAMPLES = "mean_samples"


class FedDCOptions(PluginOptions):
    """Options of FedDC."""

    alpha: float = Field(default=0.01, gt=0, description="alpha, strength of the drift's penalty R_i.")
    linear: bool = Field(
        default=True, description="The gradient correction G_i = <s - s_i, w>; without it FedDC is FedDyn."
    )
    weighting: Literal["uniform", "samples"] = Field(
        default="samples",
        description="How clients' losses count: by samples (alpha and s over W_i = n_i / mean n), or the same.",
    )


class FedDC(Plugin[FedDCOptions]):
    """FedDC (Gao, Fu, Li, Chen, Xu, Xu, CVPR 2022, arXiv 2203.11751).

    Clients minimise F_i(w) + alpha/2 |w - (w_t - h_i)|^2 + <s - s_i, w>, where the drift h_i sums how far the client's
    models moved; the server adds the mean drift of all clients to the mean of the models. The drift h_i is a sum of
    displacements, as in FedDyn, and the gradients s_i and s are control variates, as in SCAFFOLD.
    """

    server_optimizer = True

    def __init__(self, options: FedDCOptions) -> None:
        super().__init__(options)
        self.assumes = ("displacement", "sgd") if options.linear else ("displacement",)  # s_i is made of the steps
        self.uniform = options.weighting == "uniform"

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix W_i, w_t - h_i and s / W_i - s_i for the round; h_i, s and s_i begin at 0."""
        s, own = dict(client.received), client.state
        mean_samples = s.pop(MEAN_SAMPLES, None)
        weight = client_weight(client.n, None if mean_samples is None else float(mean_samples))
        client.scratch["alpha"] = self.options.alpha / weight
        parameters, start = client.parameters, client.start
        client.scratch["target"] = {p: shifted_target(start[n], own.get(f"h.{n}")) for n, p in parameters.items()}
        if self.options.linear and (s or own):
            client.scratch["gap"] = {
                p: correction(p, s.get(n), own.get(f"s.{n}"), weight) for n, p in parameters.items()
            }

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss]:
        """Add alpha/(2 W_i) R_i and, where s and s_i are known, G_i, over the shared parameters in training."""
        parameters, scratch = step.parameters, step.client.scratch
        pull = partial(proximal_term, parameters, [scratch["target"][p] for p in parameters])
        terms = [Loss(pull, weight=scratch["alpha"], name="drift")]
        if "gap" in scratch:
            terms.append(Loss(linear_term(parameters, [scratch["gap"][p] for p in parameters]), name="gradient"))
        return terms

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Renew h_i and s_i, and send the change of s_i."""
        state, gaps, changes, start = client.state, client.scratch.get("gap", {}), {}, client.start
        renew = partial(renewed_control, lr=client.lr, steps=client.steps, momentum=client.momentum)
        for name, y in client.parameters.items():
            trained, drift, own = y.detach(), f"h.{name}", f"s.{name}"
            state[drift] = renewed_displacement(state.get(drift), start[name], trained)
            if self.options.linear:
                new = renew(start[name], trained, gaps.get(y))
                changes[name] = new - state[own] if own in state else new
                state[own] = new
        return changes

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send s, from the first round's end on, and mean n over all clients where they count by samples."""
        state = server.state
        sizes = {} if self.uniform else {MEAN_SAMPLES: server.client_sizes.double().mean()}
        return sizes | {
            name: state[f"s.{name}"].to(w.dtype) for name, w in server.model.items() if f"s.{name}" in state
        }

    @hookimpl
    def weight(self) -> float:
        """Take the plain mean of the models, as the code does."""
        return 1.0

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add the change of s_i to s, the mean over all clients: s += W_i (s_i+ - s_i) / N."""
        check_changes(update.payload, server.model, server.trainable)
        sizes = server.client_sizes
        mean_samples = None if self.uniform else float(sizes.double().mean())
        share = client_weight(int(sizes[update.client]), mean_samples) / server.num_clients
        for name, change in update.payload.items():
            server.state.add(f"s.{name}", change, weight=share)

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renew the mean drift of all clients and add it to the mean of the models; what no client trained stays."""
        new, share = {}, len(server.accepted) / server.num_clients
        for name, m in mean.items():
            if name in server.frozen:
                continue  # the drift of earlier rounds would carry it away
            before = server.state.get(f"h.{name}", torch.zeros_like(m, dtype=torch.float64))
            after = renewed_mean_displacement(before, server.model[name], m, share)
            server.state[f"h.{name}"], new[name] = after, displaced_mean(m, after)
        return new


def client_weight(samples: int, mean_samples: float | None) -> float:
    """Return W_i = n_i / mean n over all clients; 1 where all clients count the same (``mean_samples`` is None).

    With alpha / W_i, s / W_i and s the mean of W_i s_i a fixed point has sum of n_i grad F_i = 0, without W_i sum of
    grad F_i = 0.

    :source: the authors' code.
    """
    return 1.0 if mean_samples is None else samples / mean_samples
