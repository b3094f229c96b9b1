"""Several clients as one computation: their steps on batches of equal shape are one step on stacked tensors.

Each client of a stack has a session and a working model of its own, whose parameters and optimizer state are slices of
stacked tensors (K, ...). All of its work but the steps is therefore the same as without a stack. A stacked step is one
forward pass and one call of each loss hook under :func:`torch.func.vmap`, one backward pass of the sum of the clients'
objectives, and one step of the optimizer on the stacked tensors.

A hook sees the first client, but every tensor that it reads of the client is the stacked one. What differs between the
clients and is no number, such as a list of another length, cannot be stacked. Nor can a Python branch on a tensor,
random numbers, or an operation that ``vmap`` does not know. Such steps are taken one by one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from typing_extensions import override

from fedcore.base.errors import FedcoreError
from fedcore.client.context import Batch, BatchStep, context_of
from fedcore.client.objective import joined_losses, require_gradient
from fedcore.client.optimizer import Optimizer
from fedcore.client.session import LocalSession, LossTotals
from fedcore.client.working_model import WorkingModel
from fedcore.hooks.contexts import ClientContext
from fedcore.models import Outputs, SplitModel

Path = tuple[Any, ...]
"""Names a value that hooks read of a client, such as ``("scratch", plugin, name)``."""

OF_RUN = frozenset({"config", "round", "rounds", "num_classes", "device", "model", "lr", "momentum"})
"""Attributes of a client that are the same for all clients of a stack."""


class NotStackable(FedcoreError):
    """A step that cannot be taken for several clients at once."""


class _Unread(FedcoreError):
    """A hook reads a value that has not been stacked yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class _Slot(NamedTuple):
    """Stands for a stacked tensor in a value."""

    number: int


class _Weight(NamedTuple):
    """Stands for a trained parameter in a value."""

    name: str


def mapped(values: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    """Return a value of the same structure as these values, with ``leaf`` applied to the leaves at the same place."""
    first = values[0]
    if isinstance(first, (_Slot, _Weight)):
        return leaf(values)
    if isinstance(first, Mapping):
        _alike([len(value) for value in values])
        keys = [mapped(pair, leaf) for pair in zip(*values, strict=True)]
        return dict(zip(keys, (mapped(pair, leaf) for pair in zip(*(v.values() for v in values), strict=True))))
    if isinstance(first, (list, tuple)):
        _alike([len(value) for value in values])
        items = [mapped(pair, leaf) for pair in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, (type, nn.Module)):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{name: mapped([getattr(value, name) for value in values], leaf) for name in names}
        )
    return leaf(values)


def _alike(values: Sequence[Any]) -> None:
    if any(value != values[0] for value in values):
        raise NotStackable("values that differ between the clients: " + ", ".join(map(repr, values))[:60])


class Reads:
    """What hooks read of the clients of a group: values whose tensors are stacked.

    :param names: the names of the first client's parameters by id; a hook that reads one sees its stacked weights.
    """

    def __init__(self, sessions: Sequence[LocalSession], names: Mapping[int, str]) -> None:
        self._sessions, self._names = sessions, names
        self.tensors: list[Tensor] = []
        self._values: dict[Path, Any] = {}

    def read(self, path: Path) -> None:
        """Stack the clients' values of a name, if they have it."""
        if path not in self._values:
            try:
                values = [_value(session, *path) for session in self._sessions]
            except KeyError:
                return  # hooks that read it see that it is missing
            self._values[path] = mapped(values, self._leaf)

    def _leaf(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            if id(first) in self._names:
                return _Weight(self._names[id(first)])
            if all(value is first for value in values):
                return first
            _alike([value.shape for value in values])
            return self._slot(torch.stack([value.detach() for value in values]))
        if isinstance(first, float) and any(value != first for value in values):
            return self._slot(torch.tensor(values, dtype=torch.float32, device=self._sessions[0].working.device))
        if isinstance(first, nn.Module):
            raise NotStackable("a module of its own")
        _alike(values)
        return first

    def _slot(self, tensor: Tensor) -> _Slot:
        self.tensors.append(tensor)
        return _Slot(len(self.tensors) - 1)

    def forget(self, plugins: Iterable[str]) -> None:
        """Read the notes of plugins anew: their ``observe`` has changed them."""
        for path in [path for path in self._values if path[0] in ("scratch", "state") and path[1] in plugins]:
            del self._values[path]

    def filled(self, path: Path, weights: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Any:
        """Return a value, with the tensors of one client as ``vmap`` shows them."""
        if path not in self._values:
            raise _Unread(path)

        def leaf(values: Sequence[Any]) -> Any:
            (value,) = values
            if isinstance(value, _Slot):
                return tensors[value.number]
            return weights[value.name] if isinstance(value, _Weight) else value

        return mapped([self._values[path]], leaf)


def _value(session: LocalSession, kind: str, plugin: str = "", name: str = "") -> Any:
    """Return what a plugin reads of a client."""
    if kind == "scratch":
        return session.scratch[plugin][name]
    if kind == "state":
        return session.states.of(plugin)[name]
    if kind == "reference":
        return session.reference
    if kind == "module":
        return session.working.frozen[plugin].module.state_dict()
    return getattr(context_of(session, plugin), kind)


Read = Callable[[Path], Any]


class StackedStep(BatchStep):
    """A step as hooks see it under ``vmap``."""

    def __init__(self, batch: Batch, outputs: Outputs, read: Read, x: Tensor, y: Tensor, indices: Tensor) -> None:
        session = batch.session
        round, rounds = session.round, session.config.rounds
        given = {"x": x, "y": y, "indices": indices, "features": outputs.features, "logits": outputs.logits}
        given |= {"round": round, "rounds": rounds, "progress": round / rounds, "epoch": batch.epoch}
        given |= {"model": session.working.module}
        vars(self).update(_batch=batch, _session=session, _plugin="", _second=None, _read=read, **given)

    @property
    def reference(self) -> list[Tensor]:  # type: ignore[override]
        return self._read(("reference",))

    @property
    @override
    def client(self) -> ClientContext:
        return StackedClient(self._session, self._plugin, self._read)

    @property
    @override
    def added(self) -> Mapping[str, nn.Parameter]:
        return self._read(("added", self._plugin))

    @property
    @override
    def parameters(self) -> list[nn.Parameter]:
        super().parameters  # noqa: B018 - checks that there are any
        return list(self._read(("parameters",)).values())

    @override
    def frozen(self, name: str) -> Outputs | None:
        self._require(name)
        return self._read(("frozen", name)) if self._session.working.frozen[name].present else None

    @property
    @override
    def global_model(self) -> SplitModel:
        module = super().global_model
        self._read(("module", "global"))
        return module

    @property
    @override
    def previous_model(self) -> SplitModel | None:
        module = super().previous_model
        if module is not None:
            self._read(("module", "previous"))
        return module

    @override
    def random(self, purpose: str) -> Any:
        raise NotStackable("step.random")


class StackedClient:
    """The client of a stacked step."""

    def __init__(self, session: LocalSession, plugin: str, read: Read) -> None:
        self._session, self._plugin, self._read = session, plugin, read

    def __getattr__(self, name: str) -> Any:
        if name in OF_RUN:
            return getattr(context_of(self._session, self._plugin), name)
        if name in ("scratch", "state"):
            return _Notes(self, name)
        if name in ("received", "class_counts", "parameters", "start", "added", "n", "steps"):
            return self._read((name, self._plugin))
        if name == "id":
            return self._session.client
        raise NotStackable(f"client.{name}")


class _Notes(Mapping[str, Any]):
    """The scratch or the state of the client of a stacked step."""

    def __init__(self, client: StackedClient, kind: str) -> None:
        session, plugin = client._session, client._plugin
        self._of, self._kind, self._plugin = client, kind, plugin
        self._first = session.scratch[plugin] if kind == "scratch" else session.states.of(plugin)

    def __getitem__(self, name: str) -> Any:
        if name not in self._first:
            raise KeyError(name)
        return self._of._read((self._kind, self._plugin, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __getattr__(self, name: str) -> Any:
        raise NotStackable(f"client.{self._kind}.{name}")

    def __setitem__(self, name: str, value: Any) -> None:
        raise NotStackable(f"client.{self._kind}[{name!r}] = ...")


class _Body(nn.Module):
    """The models that a step uses, so that one functional call gives all of them their stacked weights."""

    def __init__(self, working: WorkingModel) -> None:
        super().__init__()
        self.model = working.module
        for name, frozen in working.frozen.items():
            self.add_module(name, frozen.module)

    def forward(self, function: Callable[[SplitModel], Any]) -> Any:
        return function(self.model)


class Stack:
    """Up to K working models whose parameters are slices of stacked tensors (K, ...)."""

    def __init__(self, workings: Sequence[WorkingModel]) -> None:
        self._workings, first = workings, workings[0]
        self.device = first.device
        self.weights = {
            name: torch.stack([working.parameters[name].detach() for working in workings]) for name in first.parameters
        }
        for working, *parts in zip(workings, *self.weights.values()):
            working.bind(dict(zip(self.weights, parts, strict=True)))
        self.added: dict[str, Tensor] = {}
        """The parameters that plugins added, by plugin and name."""
        self.states: dict[str, dict[str, Tensor]] = {}
        """The optimizer's state by a parameter's name."""
        self.sums: dict[str, Tensor] = {}
        """The sums of the losses by name, (K,)."""
        self.known: dict[Path, None] = {}
        """What hooks have read of their clients."""

    def begin(self, sessions: Sequence[LocalSession]) -> None:
        """Begin with other clients, whose working models are the first ones of the stack."""
        self.sums = {}
        self.added = {}
        for name in parameters_of(sessions[0]):
            own = [parameters_of(session)[name] for session in sessions]
            if name not in self.weights:
                self.added[name] = torch.stack([parameter.detach() for parameter in own])
                for parameter, part in zip(own, self.added[name], strict=True):
                    parameter.data = part
            states = [session.optimizer.state[id(p)] for session, p in zip(sessions, own, strict=True)]
            self.states[name] = {kind: torch.stack([state[kind] for state in states]) for kind in states[0]}
            for kind, stacked in self.states[name].items():
                for state, part in zip(states, stacked, strict=True):
                    state[kind] = part

    def sum_of(self, name: str) -> Tensor:
        """Return the sums of a loss, (K,)."""
        if name not in self.sums:
            self.sums[name] = torch.zeros(len(self._workings), device=self.device)
        return self.sums[name]


def parameters_of(session: LocalSession) -> dict[str, nn.Parameter]:
    """Return the parameters that a session trains, with those that plugins added."""
    own = {name: p for name, p in session.working.parameters.items() if id(p) in session.optimizer.state}
    return own | {f"{plugin}/{name}": p for plugin, found in session.requests.added.items() for name, p in found.items()}


class Group:
    """Neighbours in a stack, from the client at ``first`` on, whose steps are one step."""

    def __init__(self, stack: Stack, first: int, sessions: Sequence[LocalSession]) -> None:
        self.sessions, one = sessions, sessions[0]
        self._stack, self._where = stack, slice(first, first + len(sessions))
        self._trained = {name: nn.Parameter(stack.weights[name][self._where]) for name in one.working.trained}
        self._added = {name: nn.Parameter(tensor[self._where]) for name, tensor in stack.added.items()}
        self._weights = {name: tensor[self._where] for name, tensor in stack.weights.items()} | self._trained
        self._weights |= self._added
        names = {id(p): name for name, p in one.working.parameters.items()}
        names |= {id(p): name for name, p in parameters_of(one).items()}
        self.reads = Reads(sessions, names)
        parameters = {id(p): self._trained.get(name) for name, p in one.working.parameters.items()}
        parameters |= {id(p): self._added[name] for name, p in parameters_of(one).items() if name in self._added}
        groups = []
        for group in one.optimizer.groups:
            own = [parameters[id(p)] for p in group.parameters]
            groups.append(dataclasses.replace(group, parameters=[p for p in own if p is not None]))
        self._optimizer = Optimizer(one.config, groups)
        for name, parameter in (self._trained | self._added).items():
            self._optimizer.state[id(parameter)] = {k: t[self._where] for k, t in stack.states[name].items()}
        self._body = _Body(one.working)

    def take(self, batches: Sequence[Batch]) -> None:
        """Take a step of each client.

        :raises NotStackable: it cannot be taken at once. Nothing has changed.
        """
        one = batches[0].session
        x = torch.stack([batch.x for batch in batches])
        y = torch.stack([batch.picked.labels for batch in batches])
        positions = torch.stack([batch.picked.positions for batch in batches])
        total, losses, features, logits = self._forward(batches, x, y, positions)
        require_gradient(one, total)
        self._optimizer.zero_grad()
        total.sum().backward()  # a client's objective depends on no other client's weights
        if one.config.clip_norm is not None:
            _clip([p.grad for p in self._trained.values() if p.grad is not None], one.config.clip_norm)
        if one.plugins.implements("observe"):
            with torch.no_grad():
                for batch, *outputs in zip(batches, features, logits, strict=True):
                    one.plugins.call_all("observe", step=BatchStep(batch, Outputs(*outputs)))
            self.reads.forget([plugin.name for plugin in one.plugins.implementers("observe")])
        self._optimizer.step()
        for name, values in losses.items():
            sums = self._stack.sum_of(name)
            sums[self._where].add_(values.detach())
            for batch, total in zip(batches, sums[self._where], strict=True):
                batch.session.losses.sums.setdefault(name, total)
        for batch in batches:
            batch.session.losses.count(losses)

    def _forward(self, batches: Sequence[Batch], *of_batch: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        """Take the forward pass. A value that a hook reads for the first time is stacked, and the pass is repeated."""
        working = batches[0].session.working
        while True:
            frozen: dict[Path, Outputs] = {}
            for path in self._stack.known:
                if path[0] == "frozen":
                    if working.frozen[path[1]].present:
                        frozen[path] = _stacked_outputs([batch.frozen(path[1]) for batch in batches])
                else:
                    self.reads.read(path)
            try:
                return self._try(batches, of_batch, frozen)
            except (FedcoreError, RuntimeError) as error:
                unread = _unread(error)
                if unread is None or unread in self._stack.known:
                    raise
                self._stack.known[unread] = None

    def _try(
        self, batches: Sequence[Batch], of_batch: Sequence[Tensor], frozen: Mapping[Path, Outputs]
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        one = copy.copy(batches[0].session)

        def of_one(
            weights: dict[str, Tensor], tensors: list[Tensor], frozen: dict[Path, Outputs], x: Tensor, *more: Tensor
        ) -> Any:
            one.losses = LossTotals({})

            def read(path: Path) -> Any:
                if path[0] != "frozen":
                    return self.reads.filled(path, weights, tensors)
                if path not in frozen:
                    raise _Unread(path)
                return frozen[path]

            def step(model: SplitModel) -> Any:
                with one.autocast():
                    outputs = Outputs(*model(x))
                    total = joined_losses(one, StackedStep(batches[0], outputs, read, x, *more))
                    return total, one.losses.sums, outputs.features, outputs.logits

            own = {f"model.{name}": weights[name] for name in self._stack.weights}
            for kind, *name in self._stack.known:
                if kind == "module":
                    found = read((kind, *name))
                    own |= {f"{name[0]}.{each}": tensor for each, tensor in found.items()}
            return functional_call(self._body, own, (step,))

        return vmap(of_one)(self._weights, self.reads.tensors, dict(frozen), *of_batch)


def _stacked_outputs(outputs: Sequence[Outputs | None]) -> Outputs:
    given = [each for each in outputs if each is not None]
    return Outputs(*map(torch.stack, zip(*given, strict=True)))


def _unread(error: BaseException | None) -> Path | None:
    """Return the path that a hook could not read, also if its call was wrapped."""
    while error is not None:
        if isinstance(error, _Unread):
            return error.path
        error = error.__cause__
    return None


def _clip(gradients: Sequence[Tensor], most: float) -> None:
    """Clip each client's gradient, as :func:`torch.nn.utils.clip_grad_norm_` does."""
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])  # (tensors, K)
    scale = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))
