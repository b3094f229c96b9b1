"""A step of several clients as its hooks see it under :func:`torch.func.vmap`.

Hooks see the first client, but each tensor that they read of it stands for the tensors of all clients, stacked. A value
that is no tensor must be the same for all clients. A number that differs becomes a tensor.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedcore import ClientContext, FedcoreError, SplitModel
from fedcore.client import Batch, BatchStep, LocalSession, context_of
from fedcore.models import Outputs, PlainAttributes

OF_RUN = ("config", "round", "rounds", "num_classes", "task", "device", "model", "lr", "momentum")
"""Attributes of a client that are the same for all clients of a stack. ``model`` has the stacked weights in a step."""
OF_CLIENT = ("received", "class_counts", "parameters", "start", "added", "n")
"""Attributes of a client that are stacked."""
OF_BEGINNING = (*OF_RUN, "received", "parameters", "start", "added", "scratch", "public", "network")
"""What ``begin_local`` finds the same at all clients of a stack that keep nothing."""
REQUESTS = ("add_parameters", "freeze")
"""What ``begin_local`` asks for; the same for all clients if it saw the same."""


class Path(NamedTuple):
    """Names a value that hooks read of a client."""

    kind: str
    """``reference``; ``frozen`` for a frozen model's outputs, ``module`` for its tensors; ``forward`` for what a pass
    over a client's samples gives; else a client's attribute."""
    owner: str = ""
    """The plugin that reads the attribute, or the name of the frozen model."""
    name: str = ""
    """The name of a value in the client's ``scratch`` or ``state``."""


class NotStackable(FedcoreError, AttributeError):
    """A step that cannot be taken for several clients at once. Nothing has changed."""


class Unread(FedcoreError):
    """A hook reads a value that is not stacked yet."""

    def __init__(self, path: Path) -> None:
        super().__init__("/".join(filter(None, path)))
        self.path = path


class _Slot(NamedTuple):
    """Stands for a stacked tensor inside of a value, by its number."""

    number: int


class _Weight(NamedTuple):
    """Stands for a parameter of the model inside of a value, or for one that a plugin added."""

    name: str


Leaf = Callable[[Sequence[Any]], Any]


def mapped(values: Sequence[Any], leaf: Leaf) -> Any:
    """Return a value of the same structure as these values, with ``leaf`` of all that stand at the same place.

    :raises NotStackable: the values have other structures.
    """
    first = values[0]
    if isinstance(first, Mapping):
        require_same(list(map(len, values)))
        keys = [mapped(each, leaf) for each in zip(*values)]
        return dict(zip(keys, [mapped(each, leaf) for each in zip(*(value.values() for value in values))]))
    if isinstance(first, (list, tuple)) and not isinstance(first, (_Slot, _Weight)):
        require_same(list(map(len, values)))
        items = [mapped(each, leaf) for each in zip(*values)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first):
        fields = [field.name for field in dataclasses.fields(first)]
        own = {name: mapped([getattr(value, name) for value in values], leaf) for name in fields}
        return dataclasses.replace(first, **own)  # type: ignore[type-var]
    return leaf(values)


def require_same(values: Sequence[Any]) -> None:
    """Refuse values that differ between the clients.

    :raises NotStackable: shows the first two.
    """
    other = next((value for value in values if value != values[0]), values[0])
    if other != values[0]:
        raise NotStackable(f"clients have different values: {values[0]!r:.40}, {other!r:.40}")


class Reads:
    """The values that hooks read of the clients of a group, with their tensors stacked.

    :param values_of: returns the clients' values of a path, or a single one for all; raises KeyError if a client lacks
        it.
    :param names: the names of the first client's parameters by id. A hook that reads one sees the stacked weights.
    :param dtype: of numbers that differ.
    """

    def __init__(
        self,
        values_of: Callable[[Path], Sequence[Any]],
        names: Mapping[int, str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._values_of, self._names, self._dtype, self._device = values_of, names, dtype, device
        self._values: dict[Path, Any] = {}
        self.tensors: list[Tensor] = []
        """The stacked tensors, (K, ...) each."""

    def read(self, path: Path) -> None:
        """Stack the clients' values of a name, unless that is done. If a client lacks the name, its hook will say so.

        :raises NotStackable: the values differ in more than numbers.
        """
        if path not in self._values:
            try:
                values = self._values_of(path)
            except KeyError:
                return
            self._values[path] = mapped(values, self._stacked)

    def forget(self, plugins: Iterable[str]) -> None:
        """Drop the notes of plugins, since their ``observe`` changes them."""
        for path in [path for path in self._values if path.kind in ("scratch", "state") and path.owner in plugins]:
            del self._values[path]

    def get(self, path: Path, weights: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Any:
        """Return a value with the weights and the tensors of one client.

        :raises Unread: it is not stacked yet.
        """
        if path not in self._values:
            raise Unread(path)

        def leaf(values: Sequence[Any]) -> Any:
            value = values[0]
            if isinstance(value, _Slot):
                return tensors[value.number]
            return weights[value.name] if isinstance(value, _Weight) else value

        return mapped([self._values[path]], leaf)

    def _stacked(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            if id(first) in self._names:
                return _Weight(self._names[id(first)])
            if all(value is first for value in values):
                return first
            require_same([value.shape for value in values])
            return self._slot(torch.stack([value.detach() for value in values]))
        if isinstance(first, float) and any(value != first for value in values):
            if 0 in values:  # a weight of 0 leaves its term out, which one step cannot do for some clients only
                require_same(sorted(values))
            return self._slot(torch.tensor(values, dtype=self._dtype, device=self._device))
        require_same(values)
        return first

    def _slot(self, tensor: Tensor) -> _Slot:
        self.tensors.append(tensor)
        return _Slot(len(self.tensors) - 1)


class Lent:
    """The notes in ``scratch`` and ``state`` that hooks have read in one call for all clients.

    Such a call would lose an edit in place, or make it once for all clients. Each call begins with an own object.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[Path, Any, Any]] = []
        self._versions: list[tuple[Path, Tensor, int]] = []

    def lend(self, path: Path, value: Any) -> Any:
        """Return a value that a hook reads, and remember it as it is."""
        if path.kind not in ("scratch", "state"):
            return value

        def remembered(values: Sequence[Any]) -> Any:
            (part,) = values
            if isinstance(part, Tensor):
                self._versions.append((path, part, part._version))
            return part if isinstance(part, (Tensor, nn.Module)) else copy.copy(part)

        self._lent.append((path, value, mapped([value], remembered)))
        return value

    def require_unedited(self) -> None:
        """Refuse edits in place.

        :raises NotStackable: with the name of the value.
        """
        edited = next((path for path, tensor, version in self._versions if tensor._version != version), None)
        for path, *values in self._lent:
            try:
                mapped(values, _require_equal)
            except NotStackable:
                edited = edited or path
        if edited is not None:
            raise NotStackable(
                f"plugin {edited.owner!r} edits client.{edited.kind}[{edited.name!r}] in place in a step"
            )


def _require_equal(values: Sequence[Any]) -> None:
    one, other = values
    if one is not other and (isinstance(one, Tensor) or isinstance(other, Tensor) or one != other):
        raise NotStackable


@contextmanager
def attributes_refused(model: nn.Module) -> Iterator[None]:
    """Refuse a block in which a network's own modules change attributes, such as a count of their calls; undo it.

    Each client begins with the first values, but a call for several clients is one call.

    :raises NotStackable: names the attribute.
    """
    first = PlainAttributes(model)
    before = Attributes(first)
    try:
        yield
    finally:
        if changed := before.changed():
            first.restore()
    if changed:
        raise NotStackable(f"the model changes its attribute {changed}")


class Attributes:
    """What a network's own modules keep outside of its state, at one moment: their attributes and unsaved buffers."""

    def __init__(self, plain: PlainAttributes) -> None:
        self._plain, self._before = plain, self._now(plain)

    @staticmethod
    def _now(plain: PlainAttributes) -> list[dict[str, list[Any]]]:
        now = [{name: _held(value) for name, value in own.items()} for own in plain.now()]
        for part, own in zip(plain.parts, now, strict=True):
            own.update({name: [part._buffers[name]] for name in part._non_persistent_buffers_set})
        return now

    def changed(self) -> str:
        """Return an attribute that is another one now, or was edited; empty if there is none."""
        for part, own, now in zip(self._plain.parts, self._before, self._now(self._plain), strict=True):
            for name in {**own, **now}:
                if not _same(own.get(name), now.get(name)):
                    return f"{type(part).__name__}.{name}"
        return ""


_PLAIN = (int, float, str)
"""Types of which equal values are the same."""


def _held(value: Any) -> list[Any]:
    """Return a value with what it holds, and how often tensors in it were edited."""
    if isinstance(value, Tensor):
        return [value, value._version]
    if isinstance(value, tuple):  # such as a shape, which is a new one each time
        return [len(value), *(held for each in value for held in _held(each))]
    if not isinstance(value, (list, dict, set, deque)):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return [value, *(held for each in inner for held in _held(each))]


def _same(first: Sequence[Any] | None, now: Sequence[Any] | None) -> bool:
    pairs = zip_longest(first or (), now or (), fillvalue=_same)
    return all(one is other or (type(one) is type(other) in _PLAIN and one == other) for one, other in pairs)


def value_at(session: LocalSession, path: Path) -> Any:
    """Return a value that a hook reads of a client, of any kind but ``frozen``."""
    if path.kind == "reference":
        return session.reference
    if path.kind == "module":
        return session.working.frozen[path.owner].module.state_dict()
    value = getattr(context_of(session, path.owner), path.kind)
    return value[path.name] if path.name else value


Read = Callable[[Path], Any]


class StackedStep(BatchStep):
    """A step under ``vmap``, as one plugin sees it.

    :param batch: the first client's.
    :param read: returns a value of the client as ``vmap`` shows it.
    :param x: the inputs; ``y`` the labels and ``indices`` the positions in the client's samples.
    """

    _read: Read

    def __init__(self, batch: Batch, outputs: Outputs, read: Read, x: Any, y: Tensor, indices: Tensor) -> None:
        super().__init__(batch, outputs)
        vars(self).update(x=x, y=y, indices=indices, _read=read)

    @property
    @override
    def reference(self) -> Any:  # type: ignore[override]
        return self._read(Path("reference"))

    @property
    @override
    def client(self) -> ClientContext:
        return StackedClient(self._session, self._plugin, self._read)

    @property
    @override
    def added(self) -> Mapping[str, nn.Parameter]:
        return self.client.added

    @property
    @override
    def parameters(self) -> list[nn.Parameter]:
        return list(self.client.parameters.values()) if super().parameters else []  # none in epochs of FedRep's head

    @override
    def frozen(self, name: str) -> Any:
        self._session.plugins.require_reads(name, self._plugin)
        return self._read(Path("frozen", name)) if self._session.working.frozen[name].present else None

    @property
    @override
    def global_model(self) -> SplitModel:
        self._read(Path("module", "global"))
        return super().global_model

    @property
    @override
    def previous_model(self) -> SplitModel | None:
        if self._session.working.frozen["previous"].present:
            self._read(Path("module", "previous"))
        return super().previous_model

    @override
    def random(self, purpose: str) -> Any:
        raise NotStackable(f"plugin {self._plugin!r} draws random numbers in a step")


class StackedClient:
    """The client of a stacked step."""

    def __init__(self, session: LocalSession, plugin: str, read: Read) -> None:
        self._session, self._plugin, self._read = session, plugin, read

    def __getattr__(self, name: str) -> Any:
        if name in OF_RUN:
            return getattr(context_of(self._session, self._plugin), name)
        if name in ("scratch", "state"):
            return _Notes(name, getattr(context_of(self._session, self._plugin), name), self._plugin, self._read)
        if name in OF_CLIENT:
            return self._read(Path(name, self._plugin))
        raise NotStackable(f"plugin {self._plugin!r} reads client.{name} in a step")


class TrainedClient(StackedClient):
    """The client of ``end_local`` for all clients of a stack, under ``vmap``."""

    def scoped(self, plugin: str) -> TrainedClient:
        """Return the view of one plugin."""
        return TrainedClient(self._session, plugin, self._read)

    def forward(self, indices: Tensor | None = None, model: SplitModel | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (features, logits, labels) of the client's samples under its trained weights."""
        if indices is not None or model not in (None, self.model):
            raise NotStackable(f"plugin {self._plugin!r} takes a pass over some samples, or of another model")
        outputs: tuple[Tensor, Tensor, Tensor] = self._read(Path("forward"))
        return outputs


class AnyClient:
    """The client of ``begin_local`` where one call is for all clients of a stack: it has nothing that may differ."""

    def __init__(self, session: LocalSession, plugin: str) -> None:
        self._session, self._plugin = session, plugin

    def scoped(self, plugin: str) -> AnyClient:
        """Return the view of one plugin."""
        return AnyClient(self._session, plugin)

    def __getattr__(self, name: str) -> Any:
        if name in OF_BEGINNING or name in REQUESTS:
            return getattr(context_of(self._session, self._plugin), name)
        raise NotStackable(f"plugin {self._plugin!r} reads client.{name} in begin_local")


class _Notes(Mapping[str, Any]):
    """A client's ``scratch`` or ``state`` in a stacked step; read-only."""

    def __init__(self, kind: str, of_first: Mapping[str, Any], plugin: str, read: Read) -> None:
        self._kind, self._first, self._plugin, self._read = kind, of_first, plugin, read

    def __getitem__(self, name: str) -> Any:
        if name not in self._first:
            raise KeyError(name)
        return self._read(Path(self._kind, self._plugin, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __setitem__(self, name: str, value: Any) -> None:
        raise NotStackable(f"plugin {self._plugin!r} writes client.{self._kind}[{name!r}] in a step")

    def __getattr__(self, name: str) -> Any:
        raise NotStackable(f"plugin {self._plugin!r} uses client.{self._kind}.{name} in a step")
