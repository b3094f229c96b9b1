"""SCAFFOLD as a fedcore plugin: control variates against client drift."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

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
from fedcore_functional import correction, linear_term, renewed_control

__all__ = ["Scaffold", "ScaffoldOptions", "server_update"]


class ScaffoldOptions(PluginOptions):
    """Options of SCAFFOLD."""

    server_lr: float = Field(
        default=1.0, gt=0, description="eta_g of Eq. 5: the server's step towards the clients' mean."
    )
    weighting: Literal["uniform", "samples"] = Field(
        default="samples",
        description="Means over clients, of models and of c_i (Eq. 5): by samples n_i, or the paper's uniform.",
    )


class Scaffold(Plugin[ScaffoldOptions]):
    """SCAFFOLD (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020, arXiv 1910.06378), Option II.

    Clients add <c - c_i, w> to their loss, that is c - c_i to every gradient (Eq. 3); c is the mean of all clients'
    c_i, also of those that are not sampled.
    """

    assumes = ("displacement", "sgd")

    def __init__(self, options: ScaffoldOptions) -> None:
        super().__init__(options)
        self.server_optimizer = options.server_lr != 1
        self.uniform = options.weighting == "uniform"

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Fix c - c_i for the round; both are 0 before the first round ends."""
        c, own = client.received, client.state
        if c or own:
            client.scratch["correction"] = {
                p: correction(p, c.get(n), own.get(n)) for n, p in client.parameters.items()
            }

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Add <c - c_i, w> (Eq. 3) over the shared parameters in training."""
        corrections = step.client.scratch.get("correction")
        if corrections is None:
            return None
        return Loss(linear_term(step.parameters, [corrections[p] for p in step.parameters]), name="correction")

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Renew c_i (Eq. 4) and send its change."""
        corrections, changes, start = client.scratch.get("correction", {}), {}, client.start
        renew = partial(renewed_control, lr=client.lr, steps=client.steps, momentum=client.momentum)
        for name, y in client.parameters.items():
            new = renew(start[name], y.detach(), corrections.get(y))
            changes[name] = new - client.state[name] if name in client.state else new
            client.state[name] = new
        return changes

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send c; nothing before the first round ended."""
        return {
            name: server.state[f"c.{name}"].to(w.dtype)
            for name, w in server.model.items()
            if f"c.{name}" in server.state
        }

    @hookimpl
    def weight(self) -> float | None:
        """Take the plain mean of the models (Eq. 5), or leave it to the samples."""
        return 1.0 if self.uniform else None

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add the change of c_i to c: c += (c_i+ - c_i) / N (Eq. 5, second half), N all clients, sampled or not.

        Weighted by samples, c = sum_i n_i c_i / sum_i n_i over all clients. n_i is the server's own number: under
        ``local-dp`` every update says 1.
        """
        sizes = server.client_sizes
        share = 1 / server.num_clients if self.uniform else int(sizes[update.client]) / int(sizes.sum())
        check_changes(update.payload, server.model, server.trainable)
        for name, change in update.payload.items():
            server.state.add(f"c.{name}", change, weight=share)

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Step towards the mean of the models (Eq. 5, first half); eta_g = 1 takes the mean itself."""
        if self.options.server_lr == 1:
            return None
        return {name: server_update(server.model[name], m, self.options.server_lr) for name, m in mean.items()}


def server_update(start: Tensor, mean: Tensor, server_lr: float) -> Tensor:
    """Return x + eta_g mean_S(y_i - x).

    :source: Eq. 5, first half.
    """
    return start + server_lr * (mean - start)
