"""The rules that own the aggregation: of all shared parameters and buffers, every client counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientUpdate, Plugin, PluginOptions, ServerContext, hookimpl
from fedcore_robust import equations as eq
from fedcore_robust.heterogeneity import bucket_weights, neighbour_weights


class RuleOptions(PluginOptions):
    """Options of every rule."""

    fraction: float = Field(
        default=0.2, ge=0, lt=0.5, description="Assumed share of attackers: f is this part of the round's n updates."
    )
    before: Literal["none", "bucketing", "nnm"] = Field(
        default="none",
        description="Mix updates before the rule: means of random buckets, or nearest-neighbour mixing.",
    )
    bucket: int = Field(default=2, ge=1, description="s: updates in a bucket, for before=bucketing.")


class Rule(Plugin):
    """Owns everything that is shared; a client's number of samples weighs nothing, since it could claim any number."""

    Options = RuleOptions
    options: RuleOptions
    owns = ("*",)

    @hookimpl
    def weight(self) -> float:
        """Count every client once. The mean that the weights are for is not used; a second weigher is refused."""
        return 1.0

    def mixed(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> Callable[[str], Tensor]:
        """Return a function that stacks one tensor of all clients, (n, ...), mixed as ``before`` says.

        Buffers are not mixed: the distances do not see them, so that a mean could hold an attacker's.
        """
        n, trainable = len(updates), server.trainable
        if self.options.before == "none" or not trainable:
            return partial(_stacked, updates)
        if self.options.before == "bucketing":
            order = torch.randperm(n, generator=server.generator(f"{self.name}/buckets"))
            weights = bucket_weights(order, self.options.bucket)
        else:
            byzantine = self.attackers(server, n, (n - 1) // 2)
            weights = neighbour_weights(distances_of(partial(_stacked, updates), trainable), byzantine)

        def mixed(name: str) -> Tensor:
            values = _stacked(updates, name)
            if name not in trainable:
                return values
            return (weights @ values.double().reshape(n, -1)).view(-1, *values.shape[1:]).to(values.dtype)

        return mixed

    def attackers(self, server: ServerContext, n: int, most: int, updates: int | None = None) -> int:
        """Return how many of n vectors are assumed to be attackers', at most as many as the rule can outvote.

        :param updates: the number of updates, of which the assumed share are attackers; default n.
        """
        fraction, most = self.options.fraction, max(0, most)
        assumed = math.ceil(fraction * (updates or n) - 1e-9)  # 0.07 * 100 is a little more than 7
        if assumed > most:
            server.note(
                f"{n} updates outvote {most} attackers at most, but fraction "
                f"{fraction} assumes {assumed}; more clients per round or a smaller fraction would do"
            )
        return min(assumed, most)


class Median(Rule):
    """Coordinate-wise median (Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv 1803.01498, Definition 1)."""

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the median of every coordinate, buffers included."""
        stacked = self.mixed(server, updates)
        return {name: eq.coordinate_median(stacked(name)) for name in updates[0].model}


class TrimmedMean(Rule):
    """Coordinate-wise trimmed mean (Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv 1803.01498, Definition 2)."""

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the trimmed mean of every coordinate; of integer buffers the median."""
        stacked, means = self.mixed(server, updates), dict[str, Tensor]()
        trim = cache(lambda n: self.attackers(server, n, (n - 1) // 2, len(updates)))
        for name in updates[0].model:
            values = stacked(name)
            floating = values.is_floating_point()
            means[name] = eq.trimmed_mean(values, trim(len(values))) if floating else eq.coordinate_median(values)
        return means


class KrumOptions(RuleOptions):
    """Options of Krum."""

    select: int = Field(
        default=1, ge=1, description="m: updates of least score that are averaged; 1 is Krum, else Multi-Krum."
    )


class Krum(Rule):
    """Krum and Multi-Krum (Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv 1703.02757).

    Takes the update that is nearest to its n - f - 2 nearest ones, or the mean of the m best.
    """

    Options = KrumOptions
    options: KrumOptions

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the mean of the chosen updates, and every other tensor's median over all of them.

        The distances are between trainable parameters: a client that is chosen for them could send any buffers.
        """
        stacked, trainable = self.mixed(server, updates), server.trainable
        distances = distances_of(stacked, trainable)
        chosen, n = [0], len(distances)
        byzantine = self.attackers(server, n, (n - 3) // 2, len(updates))
        if n > 1:
            chosen = eq.lowest(eq.krum_scores(distances, byzantine), min(self.options.select, n - byzantine))
        means = {name: eq.trimmed_mean(stacked(name)[chosen], 0) for name in trainable}
        return {**medians(updates), **means}


def _stacked(updates: Sequence[ClientUpdate], name: str) -> Tensor:
    """Return one tensor of all clients, (n, ...)."""
    return torch.stack([update.model[name] for update in updates])


def medians(updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
    """Return every tensor's median over the clients, for the buffers of rules that see parameters only."""
    return {name: eq.coordinate_median(_stacked(updates, name)) for name in updates[0].model}


def distances_of(stacked: Callable[[str], Tensor], names: Sequence[str]) -> Tensor:
    """Return the squared distances of every two clients over these tensors, (n, n)."""
    return eq.squared_distances(stacked(name) for name in names)
