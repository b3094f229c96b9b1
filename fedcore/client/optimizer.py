"""The optimizers of local training: torch's fused SGD, Adam and AdamW, called as functions.

Creating an object of ``torch.optim.SGD`` imports torch's compiler. This takes about 2 s and 70 MB in every process, as
long as importing torch. The functions under these classes take the same steps without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedcore.base.config import TrainingOptions


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same learning rate and weight decay."""

    parameters: Sequence[nn.Parameter]
    lr: float
    weight_decay: float


class Optimizer:
    """The optimizer of a run's configuration, for groups of parameters. Parameters without a gradient do not change.

    :param memory: the state of earlier optimizers by a parameter's id. Its tensors are used again; new state is added
        to it.
    """

    def __init__(
        self,
        options: TrainingOptions,
        groups: Iterable[ParameterGroup],
        memory: dict[int, dict[str, Tensor]] | None = None,
    ) -> None:
        self.options = options
        self.groups = list(groups)
        self._memory = {} if memory is None else memory
        # A tensor's own hash takes ten times as long as its id.
        self.state: dict[int, dict[str, Tensor]] = {}
        """The state of each parameter by its id."""
        # On a CPU torch 2.13's fused SGD leaves bfloat16 and float16 as they are, all but the last numbers of a tensor.
        self._fused = options.optimizer != "sgd" or not any(p.is_cpu and p.itemsize == 2 for p in self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, group by group."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters the state before the first step: zeros. For momentum this equals torch's missing state."""
        used: list[Tensor] = []
        for parameter in parameters:
            if id(parameter) in self._memory:
                used += self._memory[id(parameter)].values()
            else:
                self._memory[id(parameter)] = self._zeros(parameter)
            self.state[id(parameter)] = self._memory[id(parameter)]
        if used:
            torch._foreach_zero_(used)

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if self.options.optimizer == "sgd":
            return {"momentum": torch.zeros_like(parameter)} if self.options.momentum else {}
        steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter), "steps": steps}

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the gradients."""
        for group in self.groups:
            used: list[Tensor] = [parameter for parameter in group.parameters if parameter.grad is not None]
            self._step(group, used, [parameter.grad for parameter in used if parameter.grad is not None])

    def _step(self, group: ParameterGroup, used: list[Tensor], gradients: list[Tensor]) -> None:
        options = self.options
        states = [self.state[id(parameter)] for parameter in used]
        rates: Any = {"lr": group.lr, "weight_decay": group.weight_decay, "fused": self._fused, "maximize": False}
        if options.optimizer == "sgd":
            buffers = [state.get("momentum") for state in states]
            sgd(used, gradients, buffers, momentum=options.momentum, dampening=0.0, nesterov=False, **rates)
        else:
            step = adamw if options.optimizer == "adamw" else adam
            first, second, steps = ([state[kind] for state in states] for kind in ("first", "second", "steps"))
            rates |= {"beta1": options.beta1, "beta2": options.beta2, "eps": options.epsilon, "amsgrad": False}
            step(used, gradients, first, second, [], steps, **rates)
