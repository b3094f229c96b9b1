"""One client's work on one task: the length of its training, the parameters that it trains, and its losses."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.config import RunConfig, TrainingOptions
from fedcore.base.errors import PluginContractError
from fedcore.base.plugin_state import States
from fedcore.base.seeding import derive_seed, generator
from fedcore.base.tensors import copy_into, numbers
from fedcore.base.types import Tensors
from fedcore.client.optimizer import Optimizer, ParameterGroup
from fedcore.client.working_model import Memory, WorkingModel
from fedcore.data import PublicSamples
from fedcore.data.client_data import ClientData
from fedcore.hooks.contexts import ClientContext
from fedcore.hooks.plugins import PluginSet
from fedcore.models import PlainAttributes, frozen_modules


@dataclass(frozen=True)
class LocalWork:
    """The work of one client in a round."""

    epochs: int
    """The number of passes over the client's samples. The last pass is cut short after ``most_steps``."""
    most_steps: int | None
    """The limit on optimizer steps; None if the work is given in epochs."""
    smallest_batch: int
    """Smaller batches are skipped."""
    sees_all_samples: bool
    """Whether every sample is in some batch, but for those that ``drop_last`` leaves out."""

    @classmethod
    def of(cls, options: TrainingOptions, samples: int, needed: int, meta: Mapping[str, Any]) -> LocalWork:
        """Return the work of a client.

        :param samples: the number of its samples.
        :param needed: the number of samples that the model needs in a batch.
        :param meta: the task's ``epochs`` or ``steps``; without them the client does the configuration's work.
        """
        smallest_batch = options.smallest_batch(samples, needed)
        unit, work = options.work_of(meta)
        if unit == "epochs":
            return cls(work, None, smallest_batch, True)
        per_epoch = options.batches(samples, needed)
        epochs = math.ceil(work / per_epoch) if per_epoch else 0
        return cls(epochs, work, smallest_batch, work * options.batch_size >= samples)


class LossTotals:
    """Sums of losses by name, on the device. They are read once, after the last epoch.

    :param sums: tensors for the sums, which are set to 0.
    """

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self.sums = sums
        self.counts = Counter[str]()
        """The number of batches with each loss, by its name."""
        for total in sums.values():
            total.zero_()

    def add(self, name: str, value: Tensor, count: int = 1) -> None:
        """Add one batch's value, or the sum of several."""
        if name in self.sums:
            self.sums[name].add_(value.detach())
        else:
            # A sum in bfloat16 stops growing at 256 times its terms.
            self.sums[name] = value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        self.counts[name] += count

    def means(self) -> dict[str, float]:
        """Return the mean of each loss over its batches; syncs with the host once."""
        totals = numbers({name: self.sums[name] for name in self.counts})
        return {name: totals[name] / count for name, count in self.counts.items()}


@dataclass
class TrainingRequests:
    """The requests of plugins in ``begin_local`` about a round's training."""

    open: bool = False
    """Whether ``begin_local`` runs. Plugins can make requests only then."""
    added: defaultdict[str, dict[str, nn.Parameter]] = field(default_factory=lambda: defaultdict(dict))
    """Parameters that are trained next to the model's parameters, by plugin and name."""
    groups: list[ParameterGroup] = field(default_factory=list)
    """The optimizer's groups of the added parameters."""
    frozen: list[tuple[frozenset[str], slice]] = field(default_factory=list)
    """Names of parameters of the model, with the local epochs in which they are not trained."""

    def excluded(self, epoch: int, epochs: int) -> frozenset[str]:
        """Return the names that are not trained in a local epoch.

        :param epochs: the number of local epochs.
        """
        return frozenset().union(*(names for names, when in self.frozen if epoch in range(epochs)[when]))


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
    lr: float
    """The learning rate of the round."""
    received: Mapping[str, Tensors]
    """The round's broadcasts, by plugin."""
    start: Tensors
    """The weights from which the client starts, shared and personal."""
    previous: Tensors
    """The client's model after its last committed participation; empty before the first."""
    states: States
    """The plugins' states, by plugin."""
    public: PublicSamples | None = None
    """The public samples of the run."""
    memory: Memory = field(init=False)
    """The memory of losses, reference and optimizer in a training."""
    losses: LossTotals = field(init=False)
    requests: TrainingRequests = field(default_factory=TrainingRequests)
    optimizer: Optimizer = field(init=False)
    """The round's optimizer. It has all parameters that some epoch trains, and the added parameters."""
    reference: list[Tensor] = field(default_factory=list)
    """The values of the parameters that are trained now and travel, at the start of the round."""
    excluded: frozenset[str] = frozenset()
    """The parameters that plugins froze in the current epoch. Outside of epochs: those frozen in all epochs."""
    steps: int = 0
    """The number of optimizer steps so far."""
    scratch: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """The plugins' values for this round, by plugin."""
    contexts: dict[str, ClientContext] = field(default_factory=dict)
    """The client as each plugin sees it."""
    seconds: float = 0.0
    """The seconds of the training so far."""
    plugin_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The seconds of the training so far in each plugin."""
    _since: float = 0.0
    _plugins_since: dict[str, float] = field(default_factory=dict)
    _throughout: frozenset[str] = frozenset()
    _parked: tuple[Tensors, PlainAttributes] | None = None

    def close(self) -> None:
        """Drop the contexts. They refer back to the session, which would outlive its use."""
        self.contexts.clear()

    def broken(self, plugin: str | None, fault: str, **more: Any) -> PluginContractError:
        """Return the error that a plugin breaks its contract at this client."""
        return PluginContractError.of(plugin, fault, round=self.round, client=self.client, **more)

    def check_fit(
        self, returned: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, plugin: str, hook: str, names: str
    ) -> None:
        """Refuse tensors of a plugin whose names or shapes do not fit the model.

        :param expected: the model's tensors that the hook may return. The hook may leave some of them out.
        :param names: a description of these names, for the error.
        :raises PluginContractError: with the tensor and the expectation.
        """
        for name, tensor in returned.items():
            shape = expected[name].shape if name in expected else None
            if tensor.shape != shape:
                fault = f"gives {name!r} of shape {tuple(tensor.shape)}"
                raise self.broken(plugin, fault, hook=hook, expected=names if shape is None else str(tuple(shape)))

    def start_clock(self) -> None:
        """Begin to count the seconds of the client and of its plugins."""
        self._since, self._plugins_since = time.perf_counter(), dict(self.plugins.seconds)

    def stop_clock(self) -> None:
        """Add the seconds since :meth:`start_clock`."""
        self.seconds += time.perf_counter() - self._since
        for name, now in self.plugins.seconds.items():
            self.plugin_seconds[name] += now - self._plugins_since[name]

    def derive_seed(self, purpose: str) -> int:
        """Return the seed of this client's random stream in this round for a purpose."""
        return derive_seed(self.config.seed, purpose, round=self.round, client=self.client)

    def generator(self, purpose: str) -> torch.Generator:
        """Return this client's random stream in this round for a purpose."""
        return generator(self.config.seed, purpose, round=self.round, client=self.client)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the arithmetic that the run's ``precision`` asks for."""
        if self.config.precision == "bf16":
            return torch.autocast(self.working.device.type, dtype=torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def load(self) -> None:
        """Load the client's first weights into the working model and the frozen models."""
        self.working.load(self.start)
        self.working.load_frozen(self.start, self.previous)

    def start_from(self, tensors: Tensors) -> None:
        """Load the starts that plugins chose; they replace received or kept weights of the same names."""
        if tensors:
            self.start = {**self.start, **tensors}
            copy_into(self.working.state, tensors)
            self.working.load_frozen(self.start, self.previous)

    def prepare_training(self) -> None:
        """Set up the losses, and the optimizer for the parameters that some epoch trains, after ``begin_local``."""
        # Others train while it pauses, and added parameters are its own.
        self.memory = Memory() if self.working.setup.breaks or self.requests.groups else self.working.memory
        self.losses = LossTotals(self.memory.losses())
        if self.requests.frozen:
            by_epoch = (self.requests.excluded(epoch, self.work.epochs) for epoch in range(self.work.epochs or 1))
            self._throughout = frozenset.intersection(*by_epoch)
        self.working.set_trainable(self._throughout)
        self.excluded = self._throughout
        model_group = ParameterGroup(list(self.working.trained.values()), self.lr, self.config.weight_decay)
        self.optimizer = Optimizer(self.config, [model_group, *self.requests.groups], self.memory.optimizer)
        self._refer_to_start()
        self.optimizer.begin(self.optimizer.parameters)

    def begin_epoch(self, epoch: int) -> None:
        """Switch the model to training mode, and exclude the parameters that are frozen in the epoch."""
        changed = self._exclude(self.requests.excluded(epoch, self.work.epochs))
        if changed or not self.working.module.training:
            self.working.switch(training=True)
            if self.excluded or self.working.layout.fixed:  # the loop takes time in each epoch
                for module in frozen_modules(self.working.module):
                    module.eval()  # otherwise BatchNorm's statistics would change

    def end_epochs(self) -> None:
        """Switch the model to eval mode. Parameters that no epoch trains stay excluded.

        :raises PluginContractError: the model assigned a buffer, or changed a parameter that is not trained.
        """
        if changed := self.working.changed_parameter():
            fault = f"changes or unfreezes {changed!r}, a parameter without gradients, which is neither sent nor reset"
            hint = "make it a buffer, self.register_buffer(name, tensor), or let it have gradients from the start"
            raise PluginContractError.of(self.config.model, fault, kind="model", hint=hint)
        if assigned := self.working.assigned_buffer():
            fault = f"assigns the buffer {assigned}, and the new tensor would be neither sent nor reset"
            hint = f"write into it: self.{assigned.rpartition('.')[2]}.copy_(value)"
            raise PluginContractError.of(self.config.model, fault, kind="model", hint=hint)
        self._exclude(self._throughout)
        self.working.switch(training=False)

    def _exclude(self, excluded: frozenset[str]) -> bool:
        """Train the parameters that are not excluded. Return whether they are others than before."""
        if excluded == self.excluded:
            return False
        self.excluded = excluded
        self.working.set_trainable(excluded)
        self._refer_to_start()
        return True

    def _refer_to_start(self) -> None:
        self.reference = self.memory.reference({name: self.start[name] for name in self.working.shared})

    @property
    def is_paused(self) -> bool:
        """Whether the weights are parked outside of the working model."""
        return self._parked is not None

    def pause(self) -> Tensors:
        """Park what the working model holds outside of it until the training goes on; return the weights."""
        weights = self.working.snapshot()
        self._parked = weights, PlainAttributes(self.working.module)
        return weights

    def resume(self, patches: Mapping[str, Tensor]) -> None:
        """Load what was parked again after a pause. Patched parameters get fresh optimizer state."""
        assert self._parked is not None
        weights, plain = self._parked
        self.working.load({**weights, **patches}, self.excluded)
        self.working.load_frozen(self.start, self.previous)
        plain.restore()
        self._parked = None
        self.optimizer.begin([p for name, p in self.working.trained.items() if name in patches])
