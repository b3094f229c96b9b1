"""The FedALA plugin."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Plugin, PluginOptions, SplitModel, Tensors, hookimpl
from fedcore_fedala import equations as eq

COUNT = 10
"""Epochs over which the loss has to settle in the first learning of W_i."""


class FedALAOptions(PluginOptions):
    """Options of FedALA; the defaults are the paper's."""

    layers: tuple[str, ...] = Field(
        default=("classifier.*",),
        min_length=1,
        description="Upper layers, for which W_i is learned, as patterns; those below start as received.",
    )
    eta: float = Field(default=1.0, ge=0, description="eta: learning rate of W_i; 0 is FedAvg.")
    fraction: float = Field(
        default=0.8, gt=0, le=1, description="s: part of a client's samples by which W_i is learned."
    )
    batch_size: int = Field(default=10, ge=1, le=1_000_000, description="Samples per mini-batch of that learning.")
    threshold: float = Field(
        default=0.01,
        gt=0,
        description="W_i is learned until the last 10 losses deviate less from their mean, at first.",
    )
    most_epochs: int = Field(
        default=50, ge=1, le=10_000, description="Most epochs of the first learning; later ones take one."
    )


class FedALA(Plugin[FedALAOptions]):
    """FedALA, adaptive local aggregation (Zhang et al., AAAI 2023, arXiv 2212.01197), Algorithm 1.

    A client starts a round from Theta_i + (Theta - Theta_i) * W_i, element by element, Theta_i being its model of
    before, and learns W_i in [0, 1] on some of its samples. The server averages the trained models as FedAvg does.
    """

    neutral = {"eta": 0.0}
    reads = ("previous",)
    assumes = ("cross-entropy",)  # W_i is learned by it

    def __init__(self, options: FedALAOptions) -> None:
        super().__init__(options)
        self.starts = options.layers

    @hookimpl
    def begin_local(self, client: ClientContext) -> Tensors | None:
        """Learn W_i and start from the mixture; a client's first participation starts from Theta."""
        previous, patterns = client.previous_model, self.options.layers
        if previous is None or self.options.eta == 0:
            return None
        names = [name for name in client.parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
        received = {name: client.start[name] for name in names}
        own: Tensors = {name: previous.get_parameter(name) for name in names}
        shares = {name: client.state.get(name, _ones(w)) for name, w in received.items()}
        shares = self._learn(client, own, received, shares)
        client.state.update(shares)
        return eq.mixture(own, received, shares)

    def _learn(self, client: ClientContext, own: Tensors, received: Tensors, shares: Tensors) -> Tensors:
        """Return W_i after one epoch over some samples, the first time after as many as the loss needs to settle."""
        options, model, losses = self.options, client.network(), []
        count = max(1, round(options.fraction * client.n))
        part = torch.randperm(client.n, generator=client.generator("ala"))[:count]
        model.load_state_dict(eq.mixture(own, received, shares), strict=False)
        for _ in range(1 if client.state else options.most_epochs):
            for positions in part.split(options.batch_size):
                gradients = client.gradients(positions, model)
                shares = {
                    name: eq.renewed_share(share, gradients[name], own[name], received[name], options.eta)
                    for name, share in shares.items()
                }
                model.load_state_dict(eq.mixture(own, received, shares), strict=False)
            _, logits, labels = client.forward(part, model)
            losses.append(float(client.task.loss(logits, labels)))
            if eq.settled(losses, COUNT, options.threshold):
                break
        return shares

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel | None:
        """Evaluate Theta_i as the client's last participation left it."""
        return client.previous_model


def _ones(weight: Tensor) -> Tensor:
    """Return the first W_i of a weight, at least float32: of bfloat16 the next number below 1 is 0.996."""
    return torch.ones_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
