"""FedAvgM as a fedcore plugin: momentum on the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from fedcore import Plugin, PluginOptions, ServerContext, hookimpl

__all__ = ["FedAvgM", "FedAvgMOptions", "momentum_step"]

Variant = Literal["heavy-ball", "nesterov", "ema"]


class FedAvgMOptions(PluginOptions):
    """Options of FedAvgM."""

    beta: float = Field(default=0.9, ge=0, lt=1, description="beta: momentum of the server; 0 is none.")
    lr: float = Field(default=1.0, gt=0, description="eta_s: learning rate of the server.")
    variant: Variant = Field(
        default="heavy-ball",
        description="v = beta v + d, step v; nesterov steps d + beta v; ema is v = beta v + (1 - beta) d.",
    )


def momentum_step(d: Tensor, velocity: Tensor | None, beta: float, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return (the step's direction, the new velocity), all in the shape of ``d`` = w_t - mean of the y_i.

    ``velocity`` None is that of the first round, 0.

    >>> import torch
    >>> momentum_step(torch.tensor([-0.5]), torch.tensor([-1.0]), 0.9, "heavy-ball")[0]
    tensor([-1.4000])
    """
    share = 1 - beta if variant == "ema" else 1.0
    new = share * d if velocity is None else beta * velocity + share * d
    return (d + beta * new if variant == "nesterov" else new), new


class FedAvgM(Plugin[FedAvgMOptions]):
    """FedAvgM (Hsu, Qi, Brown, 2019, arXiv 1909.06335).

    d = w_t - sum p_i y_i; v <- beta v + d; w_{t+1} = w_t - eta_s v, on trainable shared parameters only: momentum
    would drive BatchNorm's running variance below 0. beta 0 and eta_s 1 are FedAvg, bit by bit.
    """

    neutral = {"beta": 0.0, "lr": 1.0}
    server_optimizer = True

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Step from w_t with momentum; the velocity stays in the server's state."""
        beta, lr, new = self.options.beta, self.options.lr, {}
        if beta == 0 and lr == 1:
            return None
        for name, y in mean.items():
            if name in server.frozen:  # nobody moved it in this round
                continue
            d = server.model[name] - y
            step, velocity = momentum_step(d, server.state.get(name), beta, self.options.variant)
            if beta > 0:
                server.state[name] = velocity
            new[name] = y + (d - lr * step)  # not w_t - lr v: without momentum at lr 1 it is y itself
        return new
