"""The record of one client's work on one task, with the losses of its training."""

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
from fedcore.base.tensors import copy_into
from fedcore.base.types import Tensors
from fedcore.client.fixed_tensors import FixedTensors
from fedcore.client.local_work import LocalWork
from fedcore.client.optimizer import Optimizer, ParameterGroup
from fedcore.client.working_model import WorkingModel
from fedcore.data import PublicSamples
from fedcore.data.samples import ClientData
from fedcore.hooks.contexts import ClientContext
from fedcore.hooks.plugins import PluginSet
from fedcore.storage.state import States


class LossTotals:
    """Sums of losses by name on the device, read once, after the last epoch.

    :param sums: tensors to add into, set to 0 here; captured steps need them at fixed addresses.
    """

    def __init__(self, sums: dict[str, Tensor] | None = None) -> None:
        self._sums = {} if sums is None else sums
        self._counts: dict[str, int] = {}
        for total in self._sums.values():
            total.zero_()

    def add(self, name: str, value: Tensor) -> None:
        """Add one batch's value."""
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(value, memory_format=torch.contiguous_format)
        self._sums[name].add_(value.detach())
        self.count([name])

    def count(self, names: Iterable[str]) -> None:
        """Count one more batch, whose values a captured step has added."""
        for name in names:
            self._counts[name] = self._counts.get(name, 0) + 1

    def names(self) -> set[str]:
        """Return the names that have a sum."""
        return set(self._sums)

    def counts(self) -> dict[str, int]:
        """Return by name how many batches took part."""
        return dict(self._counts)

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go back to earlier counts."""
        self._counts = dict(counts)

    def means(self) -> dict[str, float]:
        """Return the mean over the batches in which each loss took part; syncs with the host, once."""
        if all(self._sums[name].is_cpu for name in self._counts):
            return {name: float(self._sums[name]) / count for name, count in self._counts.items()}
        sums = [self._sums[name].double() for name in self._counts]
        # Constants are on the CPU: move all sums to the device of the others.
        device = max((total.device for total in sums), key=lambda device: device.type != "cpu")
        totals: list[float] = torch.stack([total.to(device) for total in sums]).tolist()
        return {name: total / count for total, (name, count) in zip(totals, self._counts.items(), strict=True)}


@dataclass
class TrainingRequests:
    """What plugins ask of a round's training in ``begin_local``.

    :ivar open: whether ``begin_local`` runs, the only time when something can be asked.
    :ivar added: parameters that are trained beside the model's, by plugin and name; ``groups`` for the optimizer.
    :ivar frozen: names of parameters of the model that are not trained, and the local epochs in which they are not.
    """

    open: bool = False
    added: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    frozen: list[tuple[frozenset[str], slice]] = field(default_factory=list)

    def excluded(self, epoch: int, epochs: int) -> frozenset[str]:
        """Return the names that are not trained in one of so many local epochs."""
        return frozenset().union(*(names for names, when in self.frozen if epoch in range(epochs)[when]))


@dataclass(frozen=True)
class TrainedParameters:
    """What a local epoch trains.

    :ivar parameters: those of the model; ``shared`` the ones among them that travel.
    :ivar reference: the values of ``shared`` at the start of the round.
    :ivar optimizer: the round's; steps all that some epoch trains, and the added parameters.
    """

    parameters: list[nn.Parameter]
    shared: list[nn.Parameter]
    reference: list[Tensor]
    optimizer: Optimizer


@dataclass(eq=False)
class LocalSession:
    """One client's work on one task, or on a training with its pauses.

    :param lr: learning rate of the round.
    :param received: the round's broadcasts, by plugin.
    :param start: the weights that the client starts from, shared and personal.
    :param previous: the client's model after its last committed participation; empty where there is none.
    :param states: the plugins' states, by plugin.
    :param fixed: memory that captured steps of several clients work on; None where steps are not captured.
    :param public: the public samples of the run.
    :param pauses: whether the training pauses; other clients use the working model in between.
    :ivar training: what the current epoch trains; set by :meth:`prepare_training`.
    :ivar excluded: the parameters that it does not train, as plugins froze them; outside of epochs those of no epoch.
    :ivar steps: optimizer steps so far.
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
    public: PublicSamples | None = None
    losses: LossTotals = field(init=False)
    requests: TrainingRequests = field(default_factory=TrainingRequests)
    training: TrainedParameters = field(init=False)
    excluded: frozenset[str] = frozenset()
    steps: int = 0
    scratch: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    contexts: dict[str, ClientContext] = field(default_factory=dict)
    _throughout: frozenset[str] = frozenset()
    _parked: Tensors | None = None

    def __post_init__(self) -> None:
        """Choose where the losses are summed."""
        self.losses = LossTotals(None if self.fixed is None or self.own_tensors else self.fixed.losses)

    def close(self) -> None:
        """Forget what plugins see of the client; it refers back to the session, which would outlive its use."""
        self.contexts.clear()

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

    def start_from(self, tensors: Tensors) -> None:
        """Load the weights that plugins chose in place of some of those received or kept; they are the start now."""
        if tensors:
            self.start = {**self.start, **tensors}
            copy_into(self.working.state, tensors)
            self.working.load_frozen(self.start, self.previous)

    def prepare_training(self) -> None:
        """Set the optimizer up for all that is trained in some epoch of this round, after ``begin_local``."""
        epochs = self.work.epochs
        self._throughout = frozenset.intersection(*(self.requests.excluded(e, epochs) for e in range(epochs or 1)))
        self.working.set_trainable(self._throughout)
        self.excluded = self._throughout
        trained = [parameter for parameter in self.working.parameters.values() if parameter.requires_grad]
        own = ParameterGroup(trained, self.lr, self.config.weight_decay)
        optimizer = Optimizer(self.config, [own, *self.requests.groups])
        self.training = self._trained_now(optimizer)
        self._reset_optimizer(optimizer.parameters)

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of a local epoch's random numbers, such as dropout's."""
        return self.derive_seed(f"epoch/{epoch}")

    def begin_epoch(self, epoch: int) -> None:
        """Switch the model to training mode, and train what the epoch trains."""
        self._exclude(self.requests.excluded(epoch, self.work.epochs))
        self.working.modes.switch(training=True)
        for module in self.working.excluded_modules(self.excluded):
            module.eval()  # else BatchNorm's statistics would change

    def end_epochs(self) -> None:
        """Switch the model to eval mode; what no epoch trains stays excluded."""
        self._exclude(self._throughout)
        self.working.modes.switch(training=False)

    def _exclude(self, excluded: frozenset[str]) -> None:
        if excluded != self.excluded:
            self.excluded = excluded
            self.working.set_trainable(excluded)
            self.training = self._trained_now(self.training.optimizer)

    def _trained_now(self, optimizer: Optimizer) -> TrainedParameters:
        trained: list[nn.Parameter] = []
        shared: list[nn.Parameter] = []
        reference: list[Tensor] = []
        for name, parameter in self.working.parameters.items():
            if parameter.requires_grad:
                trained.append(parameter)
                if name not in self.working.layout.personal:
                    shared.append(parameter)
                    value = self.start[name]
                    reference.append(value if self.fixed is None else self.fixed.fixed(f"reference/{name}", value))
        return TrainedParameters(trained, shared, reference, optimizer)

    def _reset_optimizer(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters a new state of the optimizer, in the memory of the client before where that is possible."""
        self.training.optimizer.begin(parameters, {} if self.own_tensors else self.working.optimizer_state)

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
        self.working.load({**self._parked, **patches}, self.excluded)
        self.working.load_frozen(self.start, self.previous)
        self._parked = None
        named = self.working.parameters.items()
        self._reset_optimizer(parameter for name, parameter in named if name in patches and parameter.requires_grad)
