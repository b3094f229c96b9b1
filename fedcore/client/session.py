"""One client at work: its session, and what plugins see of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedcore.base.errors import PluginContractError
from fedcore.base.seeding import derive_seed, generator
from fedcore.base.tensors import clone
from fedcore.base.types import Tensors
from fedcore.client.frozen import all_outputs, load_state
from fedcore.client.losses import LossTotals
from fedcore.client.messages import ClientTask
from fedcore.client.optimizer import SGD, ParameterGroup
from fedcore.hooks.contexts import ClientContext
from fedcore.hooks.plugins import match
from fedcore.models import SplitModel
from fedcore.models.placement import Placement
from fedcore.storage.state import State, States, unflatten

if TYPE_CHECKING:
    from fedcore.client.runtime import ClientRuntime
    from fedcore.client.step import Batch

CORE = "fedcore"
"""Namespace of what the core itself keeps per client: previous models, personal parameters."""


class LocalSession:
    """One client's work on one task, or on a fit with its pauses."""

    def __init__(self, runtime: ClientRuntime, task: ClientTask, shared: Shared, *, read_only: str = "") -> None:
        self.runtime = runtime
        self.id, self.round, self.config = task.client, task.round, runtime.config
        self.device, self.model, self.frozen = runtime.device, runtime.model, runtime.frozen
        self.smallest_batch = 2 if runtime.has_batch_norm else 1  # BatchNorm has no variance of one sample
        self.data = runtime.training_data(task.client)
        unit, work = self.config.local_work
        work = int(task.meta.get(unit, work))
        self.most_steps = work if unit == "steps" else None
        self.epochs = self._passes(work) if unit == "steps" else work
        self.sees_all_samples = unit == "epochs" or work * self.config.batch_size >= len(self.data)
        self.received, self.lr = shared.received, float(shared.meta["lr"])
        saved = runtime.store.read(task.client, task.state_round)
        self.saved_core: dict[str, Any] = saved.pop(CORE, {})
        self.states = States(saved, read_only=read_only, device=runtime.device)
        self.start = {**runtime.first_personal, **shared.model, **prefixed(self.saved_core, "personal.")}
        self.scratch: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self.added: dict[str, dict[str, nn.Parameter]] = {}
        self.added_groups: list[ParameterGroup] = []
        self.excluded: set[str] = set()
        self.reference: list[Tensor] = []
        self.shared_parameters: list[nn.Parameter] = []
        self.trained: list[nn.Parameter] = []
        self.optimizer: SGD
        self.own_tensors = bool(runtime.setup.breaks)  # a parked session's are not another's
        self.graphs: dict[Any, Any] = {}
        fixed = None if runtime.graphs is None or self.own_tensors else runtime.graphs.losses
        self.losses, self.steps = LossTotals(fixed), 0
        self.parked: Tensors | None = None
        self.in_begin_local = False
        self.batch: Batch | None = None
        self._contexts: dict[str, ClientContext] = {}

    def _passes(self, steps: int) -> int:
        """Return the passes over the samples, the last perhaps cut short, that give so many optimizer steps."""
        size = self.config.batch_size
        full, rest = divmod(len(self.data), size)
        per_pass = full * (size >= self.smallest_batch) + (rest >= self.smallest_batch)
        return math.ceil(steps / per_pass) if per_pass else 0

    def context(self, plugin: str) -> ClientContext:
        """Return what one plugin sees of this client."""
        if plugin not in self._contexts:
            self._contexts[plugin] = SessionContext(self, plugin)
        return self._contexts[plugin]

    def derive_seed(self, purpose: str) -> int:
        """Return the seed of this client's and round's stream for a purpose."""
        return derive_seed(self.config.seed, purpose, round=self.round, client=self.id)

    def generator(self, purpose: str) -> torch.Generator:
        """Return this client's and round's stream for a purpose."""
        return generator(self.config.seed, purpose, round=self.round, client=self.id)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the arithmetic that the run's ``precision`` asks for."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put weights into the working model, and it into one condition whatever ran before: eval mode, no grads."""
        load_state(self.runtime.model_state, tensors)
        self.model.eval()
        self.set_trainable()

    def set_trainable(self) -> None:
        """Let gradients flow into what this round trains, and forget those of other clients."""
        trainable = self.runtime.setup.layout.trainable - self.excluded
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trainable)
            parameter.grad = None

    def load_frozen(self) -> None:
        """Point the frozen models at this client."""
        if "global" in self.frozen:
            self.frozen["global"].load(self.start)
        if "previous" in self.frozen:
            self.frozen["previous"].load(prefixed(self.saved_core, "previous.") or None)

    def prepare_training(self) -> None:
        """Fix what is trained in this round and set the optimizer up, after ``begin_local``."""
        self.set_trainable()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.trained.append(parameter)
                if name not in self.runtime.setup.layout.personal:
                    self.shared_parameters.append(parameter)
                    self.reference.append(self._fixed(f"reference/{name}", self.start[name]))
        own = ParameterGroup(self.trained, self.lr, self.config.weight_decay)
        self.optimizer = SGD([own, *self.added_groups], self.config.momentum)
        self.own_tensors = self.own_tensors or bool(self.added_groups)
        self.reset_momentum(self.optimizer.parameters)

    def reset_momentum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start momentum at zero."""
        if self.config.momentum:
            for parameter in parameters:
                zeros = torch.zeros_like(parameter)
                if not self.own_tensors:
                    zeros = self._fixed(f"momentum/{id(parameter)}", zeros)
                self.optimizer.velocities[parameter] = zeros

    def _fixed(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor where captured steps of other clients will find theirs; the value itself without those."""
        return value if self.runtime.graphs is None else self.runtime.graphs.fixed(name, value)

    def frozen_modules(self) -> list[nn.Module]:
        """Return the modules all of whose parameters a plugin froze for this round."""
        found: list[nn.Module] = []
        if not self.excluded:  # as for nearly every run
            return found
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            names = {f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()}
            if names and names <= self.excluded:
                found.append(module)
        return found

    def park(self) -> Tensors:
        """Take the weights out of the working model for the time of a pause; returns them."""
        self.parked = clone(self.model.state_dict())
        return self.parked

    def unpark(self, patches: Mapping[str, Tensor]) -> None:
        """Go on after a pause; patched parameters get fresh optimizer state."""
        assert self.parked is not None
        self.load({**self.parked, **patches})
        self.parked = None
        self.graphs.clear()  # they hold outputs of frozen models and momentum that are made anew here
        self.load_frozen()
        self.reset_momentum(p for name, p in self.model.named_parameters() if name in patches and p.requires_grad)


class SessionContext(ClientContext):
    """What one plugin sees of one client.

    :ivar id: client id; ``n`` number of training samples; ``class_counts`` samples per class (C,) int64.
    :ivar model: the working model.
    :ivar received: what this plugin's ``broadcast`` sent down.
    :ivar state: this plugin's tensors and JSON values, kept from one participation to the next.
    :ivar scratch: this plugin's notes for this round only; survive a pause.
    """

    def __init__(self, session: LocalSession, plugin: str) -> None:
        self._session, self._plugin = session, plugin
        self.id, self.n = session.id, len(session.data)
        self.round, self.rounds = session.round, session.config.rounds
        self.num_classes = session.runtime.dataset.num_classes
        self.model: SplitModel = session.model
        self.received: Mapping[str, Tensor] = session.received.get(plugin, {})
        self.state: State = session.states.of(plugin)
        self.scratch: dict[str, Any] = session.scratch[plugin]
        self.lr, self.momentum = session.lr, session.config.momentum

    def scoped(self, plugin: str) -> ClientContext:
        """Return the view of one plugin."""
        return self._session.context(plugin)

    @property
    def class_counts(self) -> Tensor:
        """Training samples per class, (C,) int64."""
        return torch.bincount(self._session.data.labels, minlength=self.num_classes)

    @property
    def steps(self) -> int:
        """Optimizer steps executed so far in this round."""
        if self._session.batch is not None:
            self._session.batch.depends_on.add("batch")
        return self._session.steps

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in this round."""
        return self._session.added.get(self._plugin, {})

    @property
    def previous_model(self) -> SplitModel | None:
        """The frozen model of this client's last committed participation; None before the first.

        Also in evaluation. For plugins that declare ``reads = ("previous",)``.
        """
        self._session.runtime.setup.plugins.require_reads("previous", self._plugin)
        previous = self._session.frozen["previous"]
        return previous.module if previous.present else None

    def generator(self, purpose: str) -> torch.Generator:
        """Return the stream of this seed, round, client and purpose, from its start."""
        return self._session.generator(purpose)

    def forward(self, indices: Tensor | None = None, model: SplitModel | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (features, logits, labels) over the training part: eval mode, no augmentation, no gradient.

        :param indices: positions in the training part; default all, in data-set order.
        :param model: default the working model.
        """
        data, model = self._session.data, model or self.model
        if self._session.batch is not None:
            self._session.batch.depends_on.add("batch")
        was_training = model.training
        model.eval()
        outputs = all_outputs(model, data, indices)
        model.train(was_training)
        labels = data.labels if indices is None else data.labels[indices]
        return outputs.features, outputs.logits, labels

    def add_parameters(
        self, tensors: Mapping[str, Tensor], *, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        """Train extra leaf tensors with this round's SGD; never uploaded, folded or corrected.

        :param lr: their own learning rate; default the round's. ``weight_decay`` likewise.
        """
        self._require_begin_local("add_parameters")
        device = self._session.device
        added = {name: nn.Parameter(tensor.detach().to(device, copy=True)) for name, tensor in tensors.items()}
        self._session.added.setdefault(self._plugin, {}).update(added)
        group = ParameterGroup(
            list(added.values()),
            self.lr if lr is None else lr,
            self._session.config.weight_decay if weight_decay is None else weight_decay,
        )
        self._session.added_groups.append(group)

    def freeze(self, patterns: tuple[str, ...] | list[str]) -> None:
        """Exclude parameters from this round's training, by patterns over the model's names."""
        self._require_begin_local("freeze")
        plugins = {plugin.name: plugin for plugin in self._session.runtime.setup.plugins}
        names = [name for name, _ in self.model.named_parameters()]
        self._session.excluded.update(match(patterns, names, plugins[self._plugin], "freeze"))

    def _require_begin_local(self, method: str) -> None:
        if not self._session.in_begin_local:
            raise PluginContractError(
                f"plugin {self._plugin!r}: client.{method} works in begin_local only", plugin=self._plugin
            )


class Shared:
    """A payload sent once per round, copied to the device's own memory: global model and broadcasts."""

    def __init__(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], placement: Placement) -> None:
        groups = unflatten({name: tensor.to(placement.device, copy=True) for name, tensor in tensors.items()})
        self.model: Tensors = placement.weights(groups.pop("model", {}))
        self.received: dict[str, Tensors] = unflatten(groups.pop("broadcast", {}))
        self.meta = meta


def prefixed(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries under a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
