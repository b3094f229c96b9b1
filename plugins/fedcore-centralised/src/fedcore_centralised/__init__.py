"""Centralised training, the pooled baseline, as a fedcore plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedcore import ConfigError, Plugin, PluginConflictError, RunSetup, ServerContext, Steps, hookimpl

if TYPE_CHECKING:
    from fedcore.data import Partition

__all__ = ["Centralised"]

HOLDER = 0
"""The client that holds all samples."""


class Centralised(Plugin):
    """Training on the samples of all clients in one place, with as much work as the federation does."""

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse options and plugins that need several clients, or the samples of each."""
        config = setup.config
        if config.min_clients > 1:
            raise ConfigError(f"centralised: one place trains, but min_clients is {config.min_clients}; leave it out")
        if getattr(config, "system", None) is not None:  # of fedcore-simulation
            raise ConfigError("centralised: there are no clients that --system could lose or slow; leave it out")
        if len(config.client_models) > 1:
            raise ConfigError("centralised: one place trains one model; name it with --model, not --client-models")
        for other in setup.plugins:
            for hook, effect in (
                ("local_samples", "changes the samples of single clients"),
                ("personal_parameters", "keeps parameters on each client"),
                ("personal_model", "gives each client a model of its own"),
                ("mid_local_epoch", "exchanges parameters between clients"),
            ):
                if other.implements(hook):
                    reason = f"{other.name!r} {effect}, but 'centralised' trains in one place"
                    raise PluginConflictError.of("centralised", other.name, reason)
            if "displacement" in other.assumes:  # clients without samples would count as clients that did not move
                reason = f"{other.name!r} compares how far clients moved, but 'centralised' trains in one place"
                raise PluginConflictError.of("centralised", other.name, reason)

    @hookimpl
    def assign_samples(self, setup: RunSetup, partition: Partition) -> Partition:
        """Give the training samples of all clients that train to the first one. Held-out samples stay."""
        from fedcore.data import Partition

        if partition.is_declared:
            raise ConfigError("centralised: the clients hold their own data, so it cannot come together in one place")
        clients = setup.config.training_clients
        parts = list(partition.train)
        pooled = torch.cat(parts[:clients])
        if partition.info.get("shares_samples"):
            pooled = torch.tensor(list(dict.fromkeys(pooled.tolist())))  # each once, in the same order
        empty = [torch.empty(0, dtype=torch.int64)] * (clients - 1)
        return Partition([pooled, *empty, *parts[clients:]], partition.test, partition.info)

    @hookimpl
    def select_clients(self, server: ServerContext) -> Sequence[int] | dict[int, int]:
        """Train in the one place, for as much work as a cohort of m of N clients does.

        E local epochs of the cohort see E n m / N of the n samples on average, K local steps are m K steps.
        """
        config, samples, cohort = server.config, int(server.client_sizes[HOLDER]), server.config.cohort_size
        unit, amount = config.local_work
        if unit == "steps":
            return {HOLDER: Steps(amount * cohort)}
        if cohort == server.num_clients:
            return [HOLDER]
        passes, rest = divmod(round(amount * samples * cohort / server.num_clients), samples)
        return {HOLDER: Steps(max(1, passes * config.batches(samples) + -(-rest // config.batch_size)))}
