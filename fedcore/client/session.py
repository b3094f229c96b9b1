"""The record of one client's work on one task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.config import RunConfig
from fedcore.base.seeding import derive_seed, generator
from fedcore.base.types import Tensors
from fedcore.client.fixed_tensors import FixedTensors
from fedcore.client.local_work import LocalWork
from fedcore.client.losses import LossTotals
from fedcore.client.optimizer import SGD, ParameterGroup
from fedcore.client.working_model import WorkingModel
from fedcore.data.client import ClientData
from fedcore.hooks.contexts import ClientContext
from fedcore.hooks.plugins import PluginSet
from fedcore.storage.state import States


@dataclass
class TrainingRequests:
    """What plugins ask of a round's training in ``begin_local``.

    :ivar open: whether ``begin_local`` runs, the only time when something can be asked.
    :ivar added: parameters that are trained beside the model's, by plugin and name; ``groups`` for the optimizer.
    :ivar excluded: names of parameters of the model that are not trained.
    """

    open: bool = False
    added: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class TrainedParameters:
    """What a round trains, fixed after ``begin_local``.

    :ivar parameters: those of the model; ``shared`` the ones among them that travel.
    :ivar reference: the values of ``shared`` at the start of the round.
    :ivar optimizer: steps these parameters and the added ones.
    """

    parameters: list[nn.Parameter]
    shared: list[nn.Parameter]
    reference: list[Tensor]
    optimizer: SGD


@dataclass(eq=False)
class LocalSession:
    """One client's work on one task, or on a training with its pauses.

    :param lr: learning rate of the round.
    :param received: the round's broadcasts, by plugin.
    :param start: the weights that the client starts from, shared and personal.
    :param previous: the client's model after its last committed participation; empty where there is none.
    :param states: the plugins' states, by plugin.
    :param fixed: memory that captured steps of several clients work on; None where steps are not captured.
    :param pauses: whether the training pauses; other clients use the working model in between.
    :ivar training: set by :meth:`prepare_training`.
    :ivar steps: optimizer steps so far.
    :ivar depends_on: what hooks looked at in the current step, see :class:`fedcore.client.step.Batch`.
    :ivar scratch: the plugins' values for this round, by plugin; ``contexts`` what they see of the client.
    """

    client: int
    round: int
    config: RunConfig
    plugins: PluginSet
    working: WorkingModel
    data: ClientData
    work: LocalWork
    lr: float
    received: Mapping[str, Tensors]
    start: Tensors
    previous: Tensors
    states: States
    fixed: FixedTensors | None
    pauses: bool
    losses: LossTotals = field(init=False)
    requests: TrainingRequests = field(default_factory=TrainingRequests)
    training: TrainedParameters = field(init=False)
    steps: int = 0
    depends_on: set[str] = field(default_factory=set)
    scratch: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    contexts: dict[str, ClientContext] = field(default_factory=dict)
    _parked: Tensors | None = None

    def __post_init__(self) -> None:
        """Choose where the losses are summed."""
        self.losses = LossTotals(None if self.fixed is None or self.own_tensors else self.fixed.losses)

    @property
    def own_tensors(self) -> bool:
        """Whether the session needs tensors that no other one writes to, so that its captured steps serve it alone."""
        return self.pauses or bool(self.requests.groups)

    def derive_seed(self, purpose: str) -> int:
        """Return the seed of this client's and round's stream for a purpose."""
        return derive_seed(self.config.seed, purpose, round=self.round, client=self.client)

    def generator(self, purpose: str) -> torch.Generator:
        """Return this client's and round's stream for a purpose."""
        return generator(self.config.seed, purpose, round=self.round, client=self.client)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the arithmetic that the run's ``precision`` asks for."""
        if self.config.precision == "bf16":
            return torch.autocast(self.working.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def load(self) -> None:
        """Load the weights that the client starts from into the working model, and the frozen models."""
        self.working.load(self.start)
        self.working.load_frozen(self.start, self.previous)

    def prepare_training(self) -> None:
        """Fix what is trained in this round and set the optimizer up, after ``begin_local``."""
        self.working.set_trainable(self.requests.excluded)
        trained: list[nn.Parameter] = []
        shared: list[nn.Parameter] = []
        reference: list[Tensor] = []
        for name, parameter in self.working.module.named_parameters():
            if parameter.requires_grad:
                trained.append(parameter)
                if name not in self.working.layout.personal:
                    shared.append(parameter)
                    value = self.start[name]
                    reference.append(value if self.fixed is None else self.fixed.fixed(f"reference/{name}", value))
        own = ParameterGroup(trained, self.lr, self.config.weight_decay)
        optimizer = SGD([own, *self.requests.groups], self.config.momentum)
        self.training = TrainedParameters(trained, shared, reference, optimizer)
        self._reset_momentum(optimizer.parameters)

    def _reset_momentum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start momentum at zero."""
        if self.config.momentum:
            for parameter in parameters:
                zeros = torch.zeros_like(parameter)
                if self.fixed is not None and not self.own_tensors:
                    zeros = self.fixed.fixed(f"momentum/{id(parameter)}", zeros)
                self.training.optimizer.velocities[parameter] = zeros

    @property
    def is_paused(self) -> bool:
        """Whether the weights are parked outside of the working model."""
        return self._parked is not None

    def pause(self) -> Tensors:
        """Take the weights out of the working model until the training goes on; returns them."""
        self._parked = self.working.snapshot()
        return self._parked

    def resume(self, patches: Mapping[str, Tensor]) -> None:
        """Load the weights again after a pause; patched parameters get fresh optimizer state."""
        assert self._parked is not None
        self.working.load({**self._parked, **patches}, self.requests.excluded)
        self.working.load_frozen(self.start, self.previous)
        self._parked = None
        named = self.working.module.named_parameters()
        self._reset_momentum(parameter for name, parameter in named if name in patches and parameter.requires_grad)
