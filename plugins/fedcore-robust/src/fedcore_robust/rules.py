"""The rules that own the aggregation: of all shared parameters and buffers, every client counted once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientUpdate, Plugin, PluginOptions, ServerContext, hookimpl
from fedcore_robust import equations as eq


class RobustnessWarning(UserWarning):
    """A round had fewer updates than it takes to outvote the attackers that were assumed."""


class _Rule(Plugin):
    """Owns everything that is shared; what a client says of its samples weighs nothing, since it could say anything."""

    owns = ("*",)

    @hookimpl
    def weight(self) -> float:
        """Count every client once. The mean that the weights are for is not used; a second weigher is refused."""
        return 1.0


class Median(_Rule):
    """Coordinate-wise median (Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv 1803.01498, Definition 1)."""

    @hookimpl
    def aggregate(self, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the median of every coordinate, buffers included."""
        return {name: eq.coordinate_median(values) for name, values in _stacked(updates)}


class TrimmedMeanOptions(PluginOptions):
    """Options of the trimmed mean."""

    fraction: float = Field(
        default=0.2,
        ge=0,
        lt=0.5,
        description="beta: assumed share of attackers; as many values are cut from either end.",
    )


class TrimmedMean(_Rule):
    """Coordinate-wise trimmed mean (Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv 1803.01498, Definition 2)."""

    Options = TrimmedMeanOptions
    options: TrimmedMeanOptions

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the trimmed mean of every coordinate; of integer buffers the median."""
        trim = _attackers(self, server, self.options.fraction, len(updates), (len(updates) - 1) // 2)
        return {
            name: eq.trimmed_mean(values, trim) if values.is_floating_point() else eq.coordinate_median(values)
            for name, values in _stacked(updates)
        }


class KrumOptions(PluginOptions):
    """Options of Krum."""

    fraction: float = Field(default=0.2, ge=0, lt=0.5, description="Assumed share of attackers: f is this part of n.")
    select: int = Field(
        default=1, ge=1, description="m: updates of least score that are averaged; 1 is Krum, else Multi-Krum."
    )


class Krum(_Rule):
    """Krum and Multi-Krum (Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv 1703.02757).

    Takes the update that is nearest to its n - f - 2 nearest ones, or the mean of the m best.
    """

    Options = KrumOptions
    options: KrumOptions

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the mean of the chosen updates, and every other tensor's median over all of them.

        The distances are those of trainable parameters: a client that is chosen for them could send any buffers.
        """
        n, trainable = len(updates), set(server.trainable)
        byzantine = _attackers(self, server, self.options.fraction, n, (n - 3) // 2)
        distances = eq.squared_distances(values for name, values in _stacked(updates) if name in trainable)
        chosen = list(range(n))
        if distances.ndim == 2 and n > 1:
            chosen = eq.lowest(eq.krum_scores(distances, byzantine), min(self.options.select, n - byzantine))
        return {
            name: eq.trimmed_mean(values[chosen], 0) if name in trainable else eq.coordinate_median(values)
            for name, values in _stacked(updates)
        }


def _stacked(updates: Sequence[ClientUpdate]) -> Iterator[tuple[str, Tensor]]:
    """Yield one tensor of all clients at a time, (n, ...)."""
    for name in updates[0].model:
        yield name, torch.stack([update.model[name] for update in updates])


def _attackers(plugin: Plugin, server: ServerContext, fraction: float, n: int, most: int) -> int:
    """Return how many of n clients are assumed to be attackers, at most as many as the rule can outvote."""
    assumed, most = math.ceil(fraction * n - 1e-9), max(0, most)  # 0.07 * 100 is a little more than 7
    if assumed > most:
        warnings.warn(
            f"{plugin.name}, round {server.round + 1}: {n} updates outvote {most} attackers at most, but fraction "
            f"{fraction} assumes {assumed}; more clients per round or a smaller fraction would do",
            RobustnessWarning,
            stacklevel=1,
        )
    return min(assumed, most)
