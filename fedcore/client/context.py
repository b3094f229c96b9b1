"""The client as its plugins see it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from typing_extensions import override

from fedcore.base.errors import PluginConflictError, PluginContractError
from fedcore.base.state import State
from fedcore.base.tensors import copy_into
from fedcore.base.types import Tensors
from fedcore.client.optimizer import ParameterGroup
from fedcore.client.session import LocalSession
from fedcore.client.working_model import all_outputs, order_of
from fedcore.data import PublicSamples
from fedcore.data.client_data import ClientData
from fedcore.hooks.contexts import ClientContext, View
from fedcore.hooks.plugins import match
from fedcore.models import Outputs, SplitModel
from fedcore.models.placement import forward_chunk
from fedcore.models.split import evaluating

MeanLoss = Callable[[Outputs, Tensor], Tensor]
"""Takes a model's outputs and the labels (B,); returns the mean loss, of shape ()."""


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
        self.id, self.n = session.client, len(session.data)
        self.round, self.rounds = session.round, session.config.rounds
        self.num_classes, self.device = session.working.num_classes, session.working.device
        self.model: SplitModel = session.working.module
        self.received: Mapping[str, Tensor] = session.received.get(plugin, {})
        self.state: State = session.states.of(plugin)
        self.scratch: dict[str, Any] = session.scratch[plugin]
        self.lr, self.momentum = session.lr, session.config.momentum
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
    def added(self) -> Mapping[str, nn.Parameter]:
        return self._session.requests.added.get(self._plugin, {})

    @property
    @override
    def previous_model(self) -> SplitModel | None:
        self._session.plugins.require_reads("previous", self._plugin)
        previous = self._session.working.frozen["previous"]
        return previous.module if previous.present else None

    @property
    @override
    def public(self) -> PublicSamples | None:
        return self._session.public

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
        return mean_gradients(model or self.model, session.data, names, indices, loss or cross_entropy)

    @override
    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        own, weights = copy.deepcopy(self.model), tensors or {}
        state = own.state_dict()
        unknown = sorted(set(weights) - set(state))
        if unknown:
            found = f"passes {unknown[0]!r} to client.network, but the model has no such tensor"
            raise PluginContractError.of(self._plugin, found)
        copy_into(state, weights)
        return own.eval()

    @override
    def add_parameters(
        self, tensors: Mapping[str, Tensor], *, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        self._require_begin_local("add_parameters")
        session = self._session
        device = session.working.device
        added = {name: nn.Parameter(tensor.detach().to(device, copy=True)) for name, tensor in tensors.items()}
        session.requests.added.setdefault(self._plugin, {}).update(added)
        group = ParameterGroup(
            list(added.values()),
            self.lr if lr is None else lr,
            session.config.weight_decay if weight_decay is None else weight_decay,
        )
        session.requests.groups.append(group)

    @override
    def freeze(self, patterns: tuple[str, ...] | list[str], *, epochs: slice = slice(None)) -> None:
        self._require_begin_local("freeze")
        session, plugin = self._session, self._session.plugins[self._plugin]
        for other in session.plugins if epochs != slice(None) else ():
            if "sgd" in other.assumes:
                counts = "derives gradients from the number of steps (assumes sgd)"
                reason = f"{self._plugin!r} freezes parameters in some local epochs, but {other.name!r} {counts}"
                raise PluginConflictError.of(self._plugin, other.name, reason)
        names = match(patterns, (name for name, _ in self.model.named_parameters()), plugin, "freeze")
        session.requests.frozen.append((frozenset(names), epochs))

    def _require_begin_local(self, method: str) -> None:
        if not self._session.requests.open:
            raise self._session.broken(self._plugin, f"calls client.{method}, which works in begin_local only")


def cross_entropy(outputs: Outputs, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, of shape ()."""
    return F.cross_entropy(outputs.logits, labels)


def mean_gradients(
    model: SplitModel, data: ClientData, names: Collection[str], positions: Tensor | None, loss: MeanLoss
) -> Tensors:
    """Return the gradient of a mean loss over a client's samples (default all), in the given order.

    :param names: the names of the parameters. A parameter that the loss does not depend on has gradient 0.
    """
    order = order_of(data, positions)
    own = {name: p.detach().requires_grad_() for name, p in model.named_parameters() if name in names}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in own.items()}
    with evaluating(model), torch.enable_grad():
        for part in order.split(max(100, forward_chunk(order.device) // 8)):
            outputs = Outputs(*functional_call(model, own, (data.inputs(part),)))
            value = loss(outputs, data.labels[part]) * (len(part) / len(order))
            found = torch.autograd.grad(value, list(own.values()), allow_unused=True)
            for name, gradient in zip(own, found):
                if gradient is not None:
                    total[name].add_(gradient)
    return total
