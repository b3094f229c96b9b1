"""The optimizers of local training: torch's fused SGD, Adam and AdamW, without the classes around them.

Creating a ``torch.optim.SGD`` imports torch's compiler, which takes as long as importing torch itself, in every
process; it also wraps every step in checks and profiler annotations, and ``torch.optim.sgd.sgd`` sorts its tensors
anew in every step. The kernel and its bits are the same here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from fedcore.base.config import RunConfig


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same learning rate and weight decay."""

    parameters: Sequence[nn.Parameter]
    lr: float
    weight_decay: float

    def by_dtype(self) -> list[ParameterGroup]:
        """Return the group cut into groups of one dtype each, as the fused kernels take them."""
        dtypes = dict.fromkeys(parameter.dtype for parameter in self.parameters)
        if len(dtypes) == 1:
            return [self]
        return [replace(self, parameters=[p for p in self.parameters if p.dtype == dtype]) for dtype in dtypes]


class Optimizer(ABC):
    """Steps groups of parameters; one without a gradient is not changed.

    :ivar state: by a parameter's id, its tensors by name; :meth:`fresh` gives those before the first step.
    """

    def __init__(self, groups: Iterable[ParameterGroup]) -> None:
        self.groups = [part for group in groups for part in group.by_dtype()]
        self.state: dict[int, Mapping[str, Tensor]] = {}

    @staticmethod
    def of(config: RunConfig, groups: Iterable[ParameterGroup]) -> Optimizer:
        """Return the optimizer that a run's configuration names."""
        if config.optimizer == "sgd":
            return SGD(groups, config.momentum)
        betas = (config.beta1, config.beta2)
        return Adam(groups, betas, config.epsilon, decoupled=config.optimizer == "adamw")

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
            used = [parameter for parameter in group.parameters if parameter.grad is not None]
            if used:
                self._step(group, used, [p.grad for p in used if p.grad is not None])

    @abstractmethod
    def fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's state before the first step: all zeros."""

    @abstractmethod
    def _step(self, group: ParameterGroup, used: Sequence[nn.Parameter], gradients: list[Tensor]) -> None:
        """Take one step for the parameters of a group that have gradients."""


class SGD(Optimizer):
    """SGD as in torch: coupled weight decay, no dampening.

    A momentum buffer of zeros gives the same first step as torch's missing buffer.

    :param momentum: 0 for none; else every parameter needs a ``state``.
    """

    def __init__(self, groups: Iterable[ParameterGroup], momentum: float) -> None:
        super().__init__(groups)
        self.momentum = momentum

    def fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a momentum buffer of zeros, if there is momentum."""
        return {"momentum": torch.zeros_like(parameter)} if self.momentum else {}

    def _step(self, group: ParameterGroup, used: Sequence[nn.Parameter], gradients: list[Tensor]) -> None:
        torch._fused_sgd_(
            list(used),
            gradients,
            [self.state[id(p)]["momentum"] for p in used] if self.momentum else [],
            weight_decay=group.weight_decay,
            momentum=self.momentum,
            lr=group.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adam(Optimizer):
    """Adam as in torch, with coupled weight decay; with decoupled one it is AdamW.

    :param betas: decay of the two moments; ``epsilon`` is added to the root of the second.
    """

    def __init__(
        self, groups: Iterable[ParameterGroup], betas: tuple[float, float], epsilon: float, *, decoupled: bool
    ) -> None:
        super().__init__(groups)
        self.betas, self.epsilon, self.decoupled = betas, epsilon, decoupled

    def fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return two moments of zeros, and no step taken."""
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter), "steps": count}

    def _step(self, group: ParameterGroup, used: Sequence[nn.Parameter], gradients: list[Tensor]) -> None:
        states = [self.state[id(parameter)] for parameter in used]
        adam(
            list(used),
            gradients,
            [state["first"] for state in states],
            [state["second"] for state in states],
            [],
            [state["steps"] for state in states],
            fused=True,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=group.lr,
            weight_decay=group.weight_decay,
            eps=self.epsilon,
            maximize=False,
        )
