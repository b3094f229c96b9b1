"""The optimizer of local training: torch's fused SGD, without the class around it.

Creating a ``torch.optim.SGD`` imports torch's compiler, which takes as long as importing torch itself, in every
process; it also wraps every step in checks and profiler annotations. The kernel and its bits are the same here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same learning rate and weight decay."""

    parameters: Sequence[nn.Parameter]
    lr: float
    weight_decay: float


class SGD:
    """SGD as in torch: coupled weight decay, no dampening; parameters without a gradient are not changed.

    :param momentum: 0 for none; else every parameter needs an entry in ``velocities``.
    :ivar velocities: momentum buffers. A buffer of zeros gives the same first step as torch's missing buffer.
    """

    def __init__(self, groups: Iterable[ParameterGroup], momentum: float) -> None:
        self.groups, self.momentum = list(groups), momentum
        self.velocities: dict[nn.Parameter, Tensor] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, group by group."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the gradients."""
        for group in self.groups:
            used: list[Tensor] = []
            gradients: list[Tensor] = []
            velocities: list[Tensor | None] = []
            for parameter in group.parameters:
                if parameter.grad is not None:
                    used.append(parameter)
                    gradients.append(parameter.grad)
                    if self.momentum:
                        velocities.append(self.velocities[parameter])
            if used:
                sgd(
                    used,
                    gradients,
                    velocities,
                    fused=True,
                    weight_decay=group.weight_decay,
                    momentum=self.momentum,
                    lr=group.lr,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )
