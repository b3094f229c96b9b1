"""The three plugins: one step of the server, three second moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedcore import Plugin, PluginOptions, ServerContext, hookimpl
from fedcore_fedopt import equations as eq

LARGE = 2.0**40
"""A tau beside which every movement vanishes; a power of two, so that dividing by it is exact."""


class FedAdagradOptions(PluginOptions):
    """Options of FedAdagrad."""

    lr: float = Field(default=0.1, gt=0, description="eta: learning rate of the server.")
    tau: float = Field(
        default=1e-3, gt=0, le=1e15, description="tau: adaptivity, smaller is more adaptive; v starts as tau^2."
    )
    beta1: float = Field(default=0.0, ge=0, lt=1, description="beta_1: momentum of the server; 0 is none.")


class FedAdamOptions(PluginOptions):
    """Options of FedAdam."""

    lr: float = Field(default=0.03, gt=0, description="eta: learning rate of the server.")
    tau: float = Field(
        default=1e-3, gt=0, le=1e15, description="tau: adaptivity, smaller is more adaptive; v starts as tau^2."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="beta_1: momentum of the server; 0 is none.")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="beta_2: how slowly v forgets.")


class FedYogiOptions(FedAdamOptions):
    """Options of FedYogi."""


class AdaptiveServer(Plugin, ABC):
    """Algorithm 2 (Reddi et al., ICLR 2021, arXiv 2003.00295), whatever its second moment v_t is.

    Delta_t = mean of the y_i - x_t; m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t; x_{t+1} = x_t + eta m_t / (sqrt(v_t) +
    tau), on trainable shared parameters that some client trained; v_{-1} = tau^2.
    """

    options: FedAdagradOptions | FedAdamOptions
    server_optimizer = True

    @abstractmethod
    def second_moment(self, delta: Tensor, previous: Tensor) -> Tensor:
        """Return v_t."""

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Step from x_t; both moments stay in the server's state."""
        options, state, new = self.options, server.state, {}
        for name, y in mean.items():
            if name in server.frozen:
                continue
            # In 16 bits v would lose small squares; in float16 tau^2 and most squares are 0.
            delta = y.to(torch.promote_types(y.dtype, torch.float32)) - server.model[name]
            first = eq.first_moment(delta, state.get(f"m.{name}"), options.beta1)
            second = self.second_moment(delta, state.get(f"v.{name}", torch.full_like(delta, options.tau**2)))
            if options.beta1 > 0:
                state[f"m.{name}"] = first
            state[f"v.{name}"] = second
            step = eq.server_update(first, second, options.lr, options.tau)
            new[name] = (y + (step - delta)).to(y.dtype)  # not x_t + step: where the step is delta it is y itself
        return new


class FedAdagrad(AdaptiveServer):
    """FedAdagrad (Reddi et al., ICLR 2021, arXiv 2003.00295): v_t = v_{t-1} + Delta_t^2."""

    Options = FedAdagradOptions
    options: FedAdagradOptions
    neutral = {"lr": 2 * LARGE, "tau": LARGE, "beta1": 0.0}

    def second_moment(self, delta: Tensor, previous: Tensor) -> Tensor:
        """Return v_t: what has been, and the new square."""
        return eq.adagrad(delta, previous)


class FedAdam(AdaptiveServer):
    """FedAdam (Reddi et al., ICLR 2021, arXiv 2003.00295): v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2."""

    Options = FedAdamOptions
    options: FedAdamOptions
    neutral = {"lr": LARGE, "tau": LARGE, "beta1": 0.0, "beta2": 0.0}

    def second_moment(self, delta: Tensor, previous: Tensor) -> Tensor:
        """Return v_t: a moving average of squares."""
        return eq.adam(delta, previous, self.options.beta2)


class FedYogi(AdaptiveServer):
    """FedYogi (Reddi et al., ICLR 2021, arXiv 2003.00295).

    v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2): v falls by no more than a share of the new square.
    """

    Options = FedYogiOptions
    options: FedYogiOptions
    neutral = {"lr": 2 * LARGE, "tau": LARGE, "beta1": 0.0}

    def second_moment(self, delta: Tensor, previous: Tensor) -> Tensor:
        """Return v_t, by an additive change."""
        return eq.yogi(delta, previous, self.options.beta2)
