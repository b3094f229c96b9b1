"""Noisy clients as a fedcore plugin: clients' inputs with Gaussian noise, clients with wrong labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Plugin, PluginOptions, generator, hookimpl

if TYPE_CHECKING:
    from fedcore.data import ClientData

__all__ = ["NoisyClients", "NoisyClientsOptions", "noisy_inputs", "wrong_labels"]


class NoisyClientsOptions(PluginOptions):
    """Options of the noise."""

    inputs: float = Field(
        default=0.1,
        ge=0,
        description="sigma: client i of 1..N has noise of standard deviation sigma i / N on its normalised inputs.",
    )
    labels: float = Field(default=0.0, ge=0, le=1, description="rho: share of the clients with wrong labels.")
    least: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="tau: such a client draws labels anew for a share of its samples, uniform from tau to 1.",
    )


class NoisyClients(Plugin[NoisyClientsOptions]):
    """Feature skew by noise (Li et al., ICDE 2022, arXiv 2102.02079), wrong labels (Xu et al., CVPR 2022).

    A client's noise is drawn once from the run's seed and stays the same in all rounds. Held-out samples and the test
    set stay clean.
    """

    neutral = {"inputs": 0.0, "labels": 0.0}

    def __init__(self, options: NoisyClientsOptions) -> None:
        super().__init__(options)
        self.assumes = ("classes",) if options.labels else ()

    @hookimpl
    def local_samples(self, client: ClientContext, samples: ClientData) -> ClientData:
        """Add the client's noise to its training inputs, and replace labels."""
        options, seed = self.options, client.config.seed
        inputs = labels = None
        if options.inputs > 0:
            clean = samples.inputs(torch.arange(len(samples), device=samples.labels.device))
            sigma = options.inputs * (client.id + 1) / client.config.clients
            inputs = noisy_inputs(clean, sigma, generator(seed, "noisy-clients/inputs", client=client.id))
        if options.labels > 0:
            stream = generator(seed, "noisy-clients/labels", client=client.id)
            labels = wrong_labels(samples.labels, client.num_classes, options.labels, options.least, stream)
        return samples.changed(inputs=inputs, labels=labels)


def noisy_inputs(inputs: Tensor, sigma: float, stream: torch.Generator) -> Tensor:
    """Return inputs (n, ...) with Gaussian noise of standard deviation ``sigma``.

    :param stream: a generator on the CPU.
    :raises ValueError: the inputs are no tensor of floating-point numbers.
    :source: Li et al., ICDE 2022, arXiv 2102.02079 (noise-based feature imbalance).
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ValueError("noise needs inputs that are numbers, such as images; set noisy-clients.inputs=0")
    return inputs + sigma * torch.randn(inputs.shape, generator=stream).to(inputs)


def wrong_labels(labels: Tensor, num_classes: int, rho: float, tau: float, stream: torch.Generator) -> Tensor:
    """Return a client's labels (n,) int64: with probability ``rho`` a share of them drawn anew from all classes.

    The share is uniform from ``tau`` to 1. A label that is drawn anew can be the right one.

    :param stream: a generator on the CPU.
    :source: Xu et al., FedCorr, CVPR 2022, arXiv 2204.04677.
    """
    noisy, level = torch.rand(2, generator=stream).tolist()
    if noisy >= rho:
        return labels
    drawn = torch.rand(len(labels), generator=stream) < tau + (1 - tau) * level
    others = torch.randint(num_classes, (len(labels),), generator=stream)
    return torch.where(drawn.to(labels.device), others.to(labels.device), labels)
