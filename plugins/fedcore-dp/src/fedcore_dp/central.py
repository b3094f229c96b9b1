"""Central differential privacy of clients: the server clips each update and adds noise to their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientUpdate,
    ConfigError,
    Plugin,
    RunConfig,
    RunSetup,
    ServerContext,
    hookimpl,
)
from fedcore_dp.accountant import privacy_report, spent_by
from fedcore_dp.clipping import clip_factor, joint_norm, next_clip, noised_share, update_multiplier
from fedcore_dp.conflicts import (
    LEAVES_CLIENTS,
    SEEN_ON_THE_SERVER,
    refuse_chosen_rounds,
    refuse_coarse_parameters,
    refuse_earlier_step,
    refuse_hooks,
    refuse_questions,
    refuse_shared_buffers,
)
from fedcore_dp.noise import Normal, secure_normal, secure_uniform, seeded_normal
from fedcore_dp.options import UpdateOptions


class CentralDPOptions(UpdateOptions):
    """Options of central differential privacy."""

    delta: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="delta at which epsilon is reported; default n^-1.1 for n registered clients.",
    )
    sampling: Literal["fixed", "poisson"] = Field(
        default="fixed",
        description="fixed: as many clients as --participation says, accounted as if all took part in every round; "
        "poisson: each client by itself with that chance, and accounted so.",
    )
    quantile: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="gamma: S starts at clip and follows this quantile of the updates' norms; null keeps S.",
    )
    clip_rate: float = Field(default=0.2, gt=0, description="eta_S: how fast S follows the quantile.")
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="sigma_b: standard deviation of the noise on the number of updates within S; default the larger of "
        "m / 20 and z.",
    )


class CentralDP(Plugin[CentralDPOptions]):
    """DP-FedAvg (McMahan, Ramage, Talwar, Zhang, ICLR 2018, arXiv 1710.06963), client-level, on a trusted server.

    w_{t+1} = w_t + (sum of clip(y_k - w_t, S) + N(0, z^2 S^2 I)) / m, where m is the expected number of clients in a
    round, whatever the cohort: every client counts once. With a quantile, S is adapted (Andrew et al., NeurIPS 2021).
    """

    neutral = {"clip": 1e300, "noise_multiplier": 0.0}
    assumes = ("one-model",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse a run in which clients share nothing that they train.

        With noise refuse also shared buffers, parameters of two bytes, a chosen round, and plugins that see more of
        single clients than the noised mean.
        """
        setup.require_shared(self.name)
        if not self.options.private:
            return
        refuse_shared_buffers(setup, self.name)
        refuse_coarse_parameters(setup, self.name)
        refuse_chosen_rounds(setup, self.name)
        refuse_hooks(setup, self.name, LEAVES_CLIENTS | SEEN_ON_THE_SERVER)
        refuse_questions(setup, self.name)
        refuse_earlier_step(setup, self.name)
        if self.options.sampling == "poisson":
            self._refuse_empty_rounds(setup.config)
        noise = self._count_noise(setup.config)
        if self.options.quantile is not None and 2 * noise <= self.options.noise_multiplier:
            raise ConfigError(
                f"plugin {self.name!r}: count_noise={noise:g} leaves nothing of the budget to the updates; it must be "
                f"more than half of noise_multiplier={self.options.noise_multiplier:g}"
            )

    @hookimpl
    def select_clients(self, server: ServerContext) -> Sequence[int] | None:
        """Draw each client by itself (poisson), or leave the cohort to the core.

        A round needs a client: if no client is drawn, one trains, and its update counts as zero.
        """
        if self.options.sampling == "fixed":
            return None
        available, rate = server.available, server.config.participation
        if self.options.seed_noise:
            stream = server.generator("dp/cohort")
            chances = torch.rand(len(available) + 1, generator=stream, dtype=torch.float64).tolist()
        else:
            chances = secure_uniform(len(available) + 1)
        cohort = [client for client, chance in zip(available, chances, strict=False) if chance < rate]
        server.state["idle"] = not cohort
        return cohort or [available[int(chances[-1] * len(available))]]

    @hookimpl
    def weight(self) -> float | None:
        """Count every client once; without noise leave it to the samples, as in FedAvg."""
        return 1.0 if self.options.private else None

    @hookimpl(trylast=True)  # only then y_k - w_t is the client's movement: FedBuff's late clients started elsewhere
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> ClientUpdate | None:
        """Bound the update's norm over all trainable shared parameters; other shared ones stay w_t's."""
        moves = {name: update.model[name].double() - server.model[name].double() for name in server.trainable}
        idle = self.options.sampling == "poisson" and server.state["idle"]
        norm, bound = joint_norm(moves.values()), self._bound(server)
        factor = 0.0 if idle else clip_factor(norm, bound)
        if self.options.quantile is not None and not idle:
            server.state.add("within", torch.tensor(0.5 if norm <= bound else -0.5))
        changed: dict[str, Tensor] = {}
        if self.options.private:
            changed = {name: server.model[name] for name in update.model if name not in moves}
        if factor < 1:
            changed |= {
                name: (server.model[name].double() + factor * move).to(update.model[name].dtype)
                for name, move in moves.items()
            }
        return replace(update, model={**update.model, **changed}) if changed else None

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Add the noise, and divide by the expected number of clients in place of those who came."""
        bound = self._bound(server)
        if self.options.quantile is not None:
            self._adapt(server, bound, self.options.quantile)
        if not self.options.private:
            return None
        multiplier = self.options.noise_multiplier
        if self.options.quantile is not None:
            multiplier = update_multiplier(multiplier, self._count_noise(server.config))
        expected = self._expected(server.config)
        share = len(server.accepted) / expected
        scale = multiplier * bound / expected
        normal = self._normal(server, "dp/noise")
        new = {}
        for name, value in mean.items():
            start = server.model[name].double()
            step = share * (value.double() - start)
            new[name] = (start + step + scale * normal(value.shape)).to(value.dtype)
        return new

    def _adapt(self, server: ServerContext, bound: float, quantile: float) -> None:
        """Choose the next round's bound by the noised share of updates within this one's; forget the count itself."""
        options, config = self.options, server.config
        centred = float(server.state.pop("within", 0.0))
        noise = self._count_noise(config) * float(self._normal(server, "dp/count")(())) if self.options.private else 0.0
        share = noised_share(centred, noise, self._expected(config))
        server.state["clip"] = next_clip(bound, share, quantile, options.clip_rate)
        server.state["last"], server.state["round"] = {"clip": bound, "unclipped": share}, server.round

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, Any]:
        """Report epsilon and delta after the rounds so far; no epsilon where there is no noise."""
        options, spent = self.options, dict[str, float]()
        delta = default_delta(server.num_clients) if options.delta is None else options.delta
        if options.private:
            rate = server.config.participation if options.sampling == "poisson" else 1.0
            spent = spent_by(options.accountant, options.noise_multiplier, rate, server.round + 1, delta)
        of_this_round = server.state["last"] if server.state.get("round") == server.round else {}
        return {**privacy_report(spent, delta, seeded=options.seed_noise), **of_this_round}

    def _refuse_empty_rounds(self, config: RunConfig) -> None:
        """Refuse to go on after a round without an update, and a run that such a round is likely to stop."""
        why = f"plugin {self.name!r}: with sampling=poisson a round without an accepted update must stop the run"
        if config.min_clients < 1:
            raise ConfigError(f"{why}, since no noise would be added; use --min-clients 1")
        if (system := getattr(config, "system", None)) is None:  # of fedcore-simulation
            return
        updates = self._expected(config) * system.arrival
        if system.arrival < 1 and config.rounds * math.exp(-updates) > 0.01:
            raise ConfigError(
                f"{why}. With this --system {updates:.2g} updates arrive in a round on average, so one of the "
                f"{config.rounds} rounds may well have none; use more --clients or --participation"
            )

    def _bound(self, server: ServerContext) -> float:
        """Return S of this round."""
        return float(server.state.get("clip", self.options.clip))

    def _expected(self, config: RunConfig) -> float:
        """Return m, the number of clients that a round has on average."""
        if self.options.sampling == "poisson":
            return float(config.participation * config.training_clients)
        return float(config.cohort_size)

    def _count_noise(self, config: RunConfig) -> float:
        """Return sigma_b."""
        if self.options.count_noise is not None:
            return self.options.count_noise
        return max(self._expected(config) / 20, self.options.noise_multiplier)

    def _normal(self, server: ServerContext, purpose: str) -> Normal:
        return seeded_normal(server.generator(purpose)) if self.options.seed_noise else secure_normal


def default_delta(clients: int) -> float:
    """Return n^-1.1, below one in n, as McMahan et al. take it; 0.1 for fewer than ten clients.

    >>> f"{default_delta(1_000_000):.3g}", default_delta(1)
    ('2.51e-07', 0.1)
    """
    return min(0.1, math.pow(clients, -1.1))
