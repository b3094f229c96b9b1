"""One client's work on one task: how long it trains, what it trains, and the losses of its training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.config import RunConfig
from fedcore.base.seeding import derive_seed, generator
from fedcore.base.state import States
from fedcore.base.tensors import copy_into
from fedcore.base.types import Tensors
from fedcore.client.optimizer import Optimizer, ParameterGroup
from fedcore.client.working_model import FixedTensors, WorkingModel
from fedcore.data import PublicSamples
from fedcore.data.client_data import ClientData
from fedcore.hooks.contexts import ClientContext
from fedcore.hooks.plugins import PluginSet


@dataclass(frozen=True)
class LocalWork:
    """How long one client trains in a round."""

    # Passes over the client's samples; the last is cut short after `most_steps`.
    epochs: int
    # Limit on optimizer steps; None where the work is given in epochs.
    most_steps: int | None
    # Smaller batches are skipped.
    smallest_batch: int
    # Whether every sample is in some batch.
    sees_all_samples: bool

    @classmethod
    def of(cls, config: RunConfig, samples: int, needed: int, asked: Mapping[str, Any]) -> LocalWork:
        """Return the work of a client that holds so many samples.

        :param needed: samples that the model needs in a batch.
        :param asked: a task's ``epochs`` or ``steps``, where it deviates from the configuration.
        """
        smallest_batch = config.smallest_batch(samples, needed)
        unit, configured = config.local_work
        work = int(asked.get(unit, configured))
        if unit == "epochs":
            return cls(work, None, smallest_batch, True)
        per_epoch = config.batches(samples, needed)
        epochs = math.ceil(work / per_epoch) if per_epoch else 0
        return cls(epochs, work, smallest_batch, work * config.batch_size >= samples)


class LossTotals:
    """Sums of losses by name on the device, read once, after the last epoch.

    :param sums: tensors to add into, set to 0 here; captured steps need them at fixed addresses.
    """

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self.sums = sums
        # By name, in how many batches a loss took part.
        self.counts: dict[str, int] = {}
        for total in sums.values():
            total.zero_()

    def add(self, name: str, value: Tensor) -> None:
        """Add one batch's value."""
        if name not in self.sums:
            self.sums[name] = torch.zeros_like(value, memory_format=torch.contiguous_format)
        self.sums[name].add_(value.detach())
        self.count([name])

    def count(self, names: Iterable[str]) -> None:
        """Count one more batch, whose values a captured step has added."""
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the mean over the batches in which each loss took part; syncs with the host, once."""
        sums = [self.sums[name].double() for name in self.counts]
        # Constants are on the CPU: move all sums to the device of the others.
        device = max((total.device for total in sums), key=lambda device: device.type != "cpu", default=None)
        totals: list[float] = torch.stack([total.to(device) for total in sums]).tolist() if sums else []
        return {name: total / count for total, (name, count) in zip(totals, self.counts.items(), strict=True)}


@dataclass
class TrainingRequests:
    """What plugins ask of a round's training in ``begin_local``."""

    # Whether ``begin_local`` runs, the only time when something can be asked.
    open: bool = False
    # Parameters that are trained next to the model's, by plugin and name, and their groups for the optimizer.
    added: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    # Names of parameters of the model that are not trained, and the local epochs in which they are not.
    frozen: list[tuple[frozenset[str], slice]] = field(default_factory=list)

    def excluded(self, epoch: int, epochs: int) -> frozenset[str]:
        """Return the names that are not trained in one of so many local epochs."""
        return frozenset().union(*(names for names, when in self.frozen if epoch in range(epochs)[when]))


@dataclass(frozen=True)
class TrainedParameters:
    """What a local epoch trains."""

    # Those of the model, and the ones among them that travel.
    parameters: list[nn.Parameter]
    shared: list[nn.Parameter]
    # The values of `shared` at the start of the round.
    reference: list[Tensor]
    # The round's optimizer: it steps all that some epoch trains, and the added parameters.
    optimizer: Optimizer


@dataclass(eq=False)
class LocalSession:
    """One client's work on one task, or on a training with its pauses."""

    client: int
    round: int
    config: RunConfig
    plugins: PluginSet
    working: WorkingModel
    data: ClientData
    work: LocalWork
    # The learning rate of the round.
    lr: float
    # The round's broadcasts, by plugin.
    received: Mapping[str, Tensors]
    # The weights that the client starts from, shared and personal.
    start: Tensors
    # The client's model after its last committed participation; empty where there is none.
    previous: Tensors
    # The plugins' states, by plugin.
    states: States
    # Whether the training pauses; other clients use the working model in between.
    pauses: bool
    # The public samples of the run.
    public: PublicSamples | None = None
    losses: LossTotals = field(init=False)
    requests: TrainingRequests = field(default_factory=TrainingRequests)
    # What the current epoch trains; set by `prepare_training`.
    training: TrainedParameters = field(init=False)
    # The parameters that plugins froze in this epoch; outside of epochs, in all of them.
    excluded: frozenset[str] = frozenset()
    # Optimizer steps so far.
    steps: int = 0
    # The plugins' values for this round, by plugin, and what they see of the client.
    scratch: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    contexts: dict[str, ClientContext] = field(default_factory=dict)
    _throughout: frozenset[str] = frozenset()
    _parked: Tensors | None = None

    def __post_init__(self) -> None:
        """Choose where the losses are summed."""
        self.losses = LossTotals({} if self.fixed is None else self.fixed.losses)

    def close(self) -> None:
        """Forget what plugins see of the client; it refers back to the session, which would outlive its use."""
        self.contexts.clear()

    @property
    def own_tensors(self) -> bool:
        """Whether the session needs tensors that no other one writes to, so that its captured steps serve it alone."""
        return self.pauses or bool(self.requests.groups)

    @property
    def fixed(self) -> FixedTensors | None:
        """Memory that captured steps of several clients work on; None where no step is captured for more than one."""
        return None if self.own_tensors else self.working.fixed

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
        """Load the weights that plugins chose to start from; they replace received or kept ones of the same names."""
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
        self.working.module.train()
        for module in self.working.excluded_modules(self.excluded):
            module.eval()  # else BatchNorm's statistics would change

    def end_epochs(self) -> None:
        """Switch the model to eval mode; what no epoch trains stays excluded."""
        self._exclude(self._throughout)
        self.working.module.eval()

    def _exclude(self, excluded: frozenset[str]) -> None:
        if excluded != self.excluded:
            self.excluded = excluded
            self.working.set_trainable(excluded)
            self.training = self._trained_now(self.training.optimizer)

    def _trained_now(self, optimizer: Optimizer) -> TrainedParameters:
        trained = {name: parameter for name, parameter in self.working.parameters.items() if parameter.requires_grad}
        shared = {name: parameter for name, parameter in trained.items() if name not in self.working.layout.personal}
        fixed = self.fixed
        reference = [self.start[n] if fixed is None else fixed.fixed(f"reference/{n}", self.start[n]) for n in shared]
        return TrainedParameters(list(trained.values()), list(shared.values()), reference, optimizer)

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
