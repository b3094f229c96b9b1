"""FedBuff as a fedcore plugin: a buffer of updates that started from older models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Plugin,
    PluginOptions,
    RejectUpdate,
    ServerContext,
    Tensors,
    generator,
    hookimpl,
)

__all__ = ["FedBuff", "FedBuffOptions", "discount", "server_update", "transplanted"]


class FedBuffOptions(PluginOptions):
    """Options of FedBuff."""

    staleness: int = Field(
        default=4, ge=0, le=1000, description="tau_max: the oldest start of a client, in rounds; 0 is none."
    )
    distribution: Literal["uniform", "half-normal"] = Field(
        default="uniform",
        description="tau_i: uniform on 0 to tau_max, or a half-normal duration, tau_max at three deviations.",
    )
    discount: float = Field(default=0.5, ge=0, le=10, description="a of s(tau) = (1 + tau)^-a; 0 is no discount.")
    lr: float = Field(default=1.0, gt=0, description="eta_g: learning rate of the server.")


def discount(staleness: int, power: float) -> float:
    """Return s(tau) = (1 + tau)^-a, by which a stale movement counts; 1 / sqrt(1 + tau) with a = 1/2.

    >>> discount(3, 0.5), discount(0, 0.5)
    (0.5, 1.0)
    """
    return float((1 + staleness) ** -power)


def transplanted(current: Tensor, start: Tensor, trained: Tensor, share: float) -> Tensor:
    """Return w_t + s(tau) (y_i - w_{t - tau}): the client's movement, discounted, from the present model.

    >>> transplanted(torch.tensor([5.0]), torch.tensor([1.0]), torch.tensor([3.0]), 0.5)
    tensor([6.])
    """
    return (current.double() + share * (trained.double() - start.double())).to(trained.dtype)


def server_update(current: Tensor, mean: Tensor, lr: float) -> Tensor:
    """Return w_t + eta_g Delta_t; ``mean`` is w_t + Delta_t, the mean over the buffer.

    >>> server_update(torch.tensor([1.0]), torch.tensor([3.0]), 0.5)
    tensor([2.])
    """
    return torch.lerp(current, mean, lr)


class FedBuff(Plugin[FedBuffOptions]):
    """FedBuff (Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, AISTATS 2022, arXiv 2106.06639).

    A round is one filling of the buffer: its K clients arrive with movements Delta_i = y_i - w_{t - tau_i} from models
    that are tau_i server steps old, and w_{t+1} = w_t + eta_g mean of s(tau_i) Delta_i (Algorithm 1). The tau_i are
    drawn from the run's seed: no client waits for a clock, and the same seed gives the same bits.
    """

    neutral = {"staleness": 0, "lr": 1.0}
    starts = ("*",)
    reads = ("staleness",)

    def __init__(self, options: FedBuffOptions) -> None:
        super().__init__(options)
        self.server_optimizer = options.lr != 1
        self.assumes = ("displacement",) if options.staleness > 0 else ()

    @hookimpl
    def broadcast_to(self, server: ServerContext, client: int) -> Tensors | None:
        """Send w_{t - tau_i} to a client that trains and is late."""
        tau = self._staleness(server, client) if client in server.cohort else 0
        return _model(server, tau) if 0 < tau <= self.options.staleness else None

    @hookimpl
    def begin_local(self, client: ClientContext) -> Mapping[str, Tensor] | None:
        """Start from w_{t - tau_i}."""
        return client.received or None

    @hookimpl
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> ClientUpdate | None:
        """Put w_t + s(tau_i) Delta_i in y_i's place; buffers are the client's as they are."""
        tau = self._staleness(server, update.client)
        if tau == 0:
            return None
        if tau > self.options.staleness:
            raise RejectUpdate(f"its model is {tau} server steps old, more than {self.name}.staleness allows")
        share, start = discount(tau, self.options.discount), _model(server, tau)
        moved = {
            name: transplanted(server.model[name], start[name], update.model[name], share) for name in server.trainable
        }
        return replace(update, model={**update.model, **moved})

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> Tensors | None:
        """Step by eta_g, and keep w_t for clients that will come late."""
        if self.options.staleness > 0:
            for key in [key for key in server.state if _round(key) <= server.round - self.options.staleness]:
                del server.state[key]
            server.state.update({f"{server.round}:{name}": server.model[name] for name in server.shared})
        if self.options.lr == 1:
            return None
        return {name: server_update(server.model[name], y, self.options.lr) for name, y in mean.items()}

    def _staleness(self, server: ServerContext, client: int) -> int:
        """Return tau_i: of the simulated system, or drawn from (seed, round, client), at most the rounds so far."""
        most = self.options.staleness
        if server.staleness:
            return server.staleness[client]
        stream = generator(server.config.seed, "staleness", round=server.round, client=client)
        if self.options.distribution == "uniform":
            tau = int(torch.randint(most + 1, (), generator=stream))
        else:
            tau = int(torch.randn((), generator=stream).abs() * (most / 3) + 0.5)
        return min(tau, most, server.round)


def _round(key: str) -> int:
    return int(key.partition(":")[0])


def _model(server: ServerContext, tau: int) -> Tensors:
    """Return w_{t - tau}, the oldest kept from there on: a round without an update keeps none and changes none."""
    kept = sorted({_round(key) for key in server.state if _round(key) >= server.round - tau})
    return {name: server.state[f"{kept[0]}:{name}"] if kept else server.model[name] for name in server.shared}
