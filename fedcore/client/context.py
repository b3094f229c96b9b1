"""The client and its mini-batches, as plugins see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedcore.base.errors import PluginContractError
from fedcore.base.plugin_state import State
from fedcore.base.seeding import random_stream
from fedcore.base.types import Tensors
from fedcore.client.objective import SecondPass
from fedcore.client.optimizer import ParameterGroup
from fedcore.client.session import LocalSession
from fedcore.client.working_model import MeanLoss, all_outputs, mean_gradients
from fedcore.data import Task
from fedcore.data.client_data import Picked
from fedcore.hooks.checks import load_weights
from fedcore.hooks.contexts import ClientContext, Step, View
from fedcore.hooks.plugins import match
from fedcore.models import Outputs
from fedcore.models.split import SplitModel, copied, evaluating


def context_of(session: LocalSession, plugin: str) -> ClientContext:
    """Return the client of a session as one plugin sees it. The object is the same for the whole session."""
    if plugin not in session.contexts:
        session.contexts[plugin] = SessionContext(session, plugin)
    return session.contexts[plugin]


class SessionContext(View, ClientContext):
    """The client of a session, as one plugin sees it; see :class:`fedcore.hooks.contexts.ClientContext`."""

    _argument = "client"
    _instead = "keep values by name: client.state['name'] = value, or client.scratch for values of this round"
    _plugin: str

    def __init__(self, session: LocalSession, plugin: str) -> None:
        self._session, self._plugin = session, plugin
        config = session.config
        self.id, self.n, self.round, self.rounds = session.client, len(session.data), session.round, config.rounds
        task = session.working.setup.task
        self.num_classes, self.task, self.device = task.num_classes, task.kind, session.working.device
        self.model: SplitModel = session.working.module
        self.received: Mapping[str, Tensor] = session.received.get(plugin, {})
        self.state: State = session.states.of(plugin)
        self.scratch: dict[str, Any] = session.scratch[plugin]
        self.added = session.requests.added[plugin]
        self.config, self.public, self.lr, self.momentum = config, session.public, session.lr, config.momentum
        self._sealed = True

    def scoped(self, plugin: str) -> ClientContext:
        """Return the view of one plugin."""
        return context_of(self._session, plugin)

    @property
    @override
    def class_counts(self) -> Tensor:
        return torch.bincount(self._session.data.labels, minlength=self.num_classes)

    @property
    @override
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._session.working.shared)

    @property
    @override
    def start(self) -> Tensors:
        return {name: self._session.start[name] for name in self._session.working.shared}

    @property
    @override
    def steps(self) -> int:
        return self._session.steps

    @property
    @override
    def previous_model(self) -> SplitModel | None:
        self._session.plugins.require_reads("previous", self._plugin)
        previous = self._session.working.frozen["previous"]
        return previous.module if previous.present else None

    @override
    def generator(self, purpose: str) -> torch.Generator:
        return self._session.generator(purpose)

    @override
    def forward(self, indices: Tensor | None = None, model: SplitModel | None = None) -> tuple[Tensor, Tensor, Tensor]:
        data, model = self._session.data, model or self.model
        with evaluating(model):
            outputs = all_outputs(model, data, indices)
        labels = data.labels if indices is None else data.labels[indices]
        return outputs.features, outputs.logits, labels

    @override
    def gradients(
        self, indices: Tensor | None = None, model: SplitModel | None = None, loss: MeanLoss | None = None
    ) -> Tensors:
        session = self._session
        names = session.working.layout.trainable
        loss = loss or (lambda outputs, labels: self.task.loss(outputs.logits, labels))
        return mean_gradients(model or self.model, session.data, names, indices, loss)

    @override
    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        own = copied(self.model)
        load_weights(own, tensors or {}, self._plugin, "client.network")
        return own.eval()

    @override
    def add_parameters(
        self, tensors: Mapping[str, Tensor], *, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        self._require_begin_local("add_parameters")
        session = self._session
        if twice := sorted(session.requests.added[self._plugin].keys() & tensors.keys()):
            raise PluginContractError.of(self._plugin, f"adds the parameter {twice[0]!r} twice")
        added = {name: nn.Parameter(tensor.detach().to(self.device, copy=True)) for name, tensor in tensors.items()}
        session.requests.added[self._plugin].update(added)
        lr = self.lr if lr is None else lr
        weight_decay = session.config.weight_decay if weight_decay is None else weight_decay
        session.requests.groups.append(ParameterGroup([*added.values()], lr, weight_decay))

    @override
    def freeze(self, patterns: tuple[str, ...] | list[str], *, epochs: slice = slice(None)) -> None:
        self._require_begin_local("freeze")
        if isinstance(patterns, str):
            fault = f"calls client.freeze with the text {patterns!r}"
            raise PluginContractError.of(self._plugin, fault, expected=f"a list of patterns, such as [{patterns!r}]")
        session, plugin = self._session, self._session.plugins[self._plugin]
        if epochs != slice(None):
            session.plugins.require_unfrozen_steps(self._plugin)
        names = match(patterns, (name for name, _ in self.model.named_parameters()), plugin, "freeze")
        session.requests.frozen.append((frozenset(names), epochs))

    def _require_begin_local(self, method: str) -> None:
        if not self._session.requests.open:
            raise PluginContractError.of(self._plugin, f"calls client.{method}, which works in begin_local only")


@dataclass(eq=False)
class Batch:
    """One mini-batch of one client, for one step. The views of all plugins share it."""

    session: LocalSession
    epoch: int
    number: int
    """The batch's number in the epoch, from 0."""
    picked: Picked
    last: bool = False
    """Whether the epoch's last step is on this batch."""
    lent: list[tuple[str, Tensor, int]] = field(default_factory=list, init=False)
    """The outputs of frozen models, which plugins share: name, tensor, and how often it had been edited by then."""
    _frozen: dict[str, Outputs | None] = field(default_factory=dict, init=False)

    @property
    def epoch_seed(self) -> int:
        """The seed of the random numbers of the batch's epoch, such as dropout's."""
        return self.session.derive_seed(f"epoch/{self.epoch}")

    @cached_property
    def x(self) -> Any:
        """The model's input. It is gathered when a step first reads it."""
        return self.session.data.inputs_of(self.picked)

    def part(self, rows: Tensor | slice | None) -> Batch:
        """Return a batch with some rows of this one, for another pass of the same step; None means all rows."""
        if rows is None:
            return self
        some = (None if part is None else part[rows] for part in self.picked)
        return replace(self, picked=Picked(*some))  # type: ignore[arg-type]

    def frozen(self, name: str) -> Outputs | None:
        """Return a frozen model's outputs on this batch; they are computed at most once."""
        if name not in self._frozen:
            model, data = self.session.working.frozen[name], self.session.data
            outputs: Outputs | None = None
            if model.present:
                once = self.session.work.sees_all_samples and not data.varies
                outputs = model.cached_outputs(self.picked.positions, data) if once else model.outputs(self.x)
                self.lent += [(f"frozen({name!r}).{part}", t, t._version) for part, t in outputs._asdict().items()]
            self._frozen[name] = outputs
        return self._frozen[name]


class BatchStep(View, Step):
    """One mini-batch, as one plugin sees it; see :class:`fedcore.hooks.contexts.Step`."""

    _argument = "step"
    _instead = "compute with a variable of your own, and return a loss from task_loss or local_loss"
    x: Any
    y: Tensor
    indices: Tensor
    features: Tensor
    logits: Tensor
    task: Task
    model: SplitModel
    round: int
    rounds: int
    progress: float
    epoch: int
    reference: list[Tensor]
    _batch: Batch
    _session: LocalSession
    _plugin: str
    _second: SecondPass | None
    _sealed = True

    def __init__(self, batch: Batch, outputs: Outputs) -> None:
        session, picked, rounds = batch.session, batch.picked, batch.session.config.rounds
        vars(self).update(
            x=batch.x,
            y=picked.labels,
            indices=picked.positions,
            features=outputs.features,
            logits=outputs.logits,
            task=session.working.setup.task.kind,
            model=session.working.module,
            round=session.round,
            rounds=rounds,
            progress=session.round / rounds,
            epoch=batch.epoch,
            reference=session.reference,
            _batch=batch,
            _session=session,
            _plugin="",
            _second=None,
        )

    def scoped(self, plugin: str) -> BatchStep:
        """Return the view of one plugin."""
        return self._with(_plugin=plugin)

    def _with(self, **changes: Any) -> BatchStep:
        view = object.__new__(type(self))
        vars(view).update(vars(self), **changes)  # at once, for speed: a view is made for each batch and hook
        return view

    @property
    @override
    def client(self) -> ClientContext:
        return context_of(self._session, self._plugin)

    @property
    @override
    def added(self) -> Mapping[str, nn.Parameter]:
        return self._session.requests.added[self._plugin]

    @property
    @override
    def parameters(self) -> list[nn.Parameter]:
        session = self._session
        if not session.working.shared:  # in this epoch, or in the whole run
            session.working.setup.require_shared(self._plugin)
        return list(session.working.shared.values())

    @override
    def frozen(self, name: str) -> Any:
        self._session.plugins.require_reads(name, self._plugin)
        return self._batch.frozen(name)

    @property
    @override
    def global_model(self) -> SplitModel:
        self._session.plugins.require_reads("global", self._plugin)
        return self._session.working.frozen["global"].module

    @property
    @override
    def previous_model(self) -> SplitModel | None:
        return context_of(self._session, self._plugin).previous_model

    @override
    @contextmanager
    def random(self, purpose: str) -> Iterator[None]:
        batch = self._batch
        seed = batch.session.derive_seed(f"{purpose}/{batch.epoch}/{batch.number}")
        with random_stream(seed, batch.session.working.device):
            yield

    @override
    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        if self._second is None:
            fault = "calls step.gradients_at, which works in the hook gradients only"
            raise PluginContractError.of(self._plugin, fault)
        trained, names = self._session.working.trained, "names of parameters that the step trains"
        self._session.check_fit(weights, trained, plugin=self._plugin, hook="gradients", names=names)
        return self._second.gradients_at(weights, rows)
