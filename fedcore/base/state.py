"""A plugin's state between rounds: named tensors and JSON values, of a client or of the server.

Client state is versioned by round. A task names the version to start from; the client writes a new one and
never edits an old one. Which version counts is decided by the server's manifest, when the round commits, so
a repeated, late, rejected or lost task changes nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedcore.base.errors import PluginContractError

_ABSENT: Any = object()


class State(MutableMapping[str, Any]):
    """One plugin's named tensors and JSON values.

    Reading a tensor gives this state's own copy, so that an edit in place reaches the next version only and
    never the committed one.
    """

    def __init__(
        self,
        base: Mapping[str, Any] | None = None,
        *,
        plugin: str = "",
        read_only: str = "",
        device: torch.device | None = None,
    ) -> None:
        self._plugin = plugin
        self._base = dict(base or {})
        self._own: dict[str, Any] = {}
        self._read_only = read_only
        self._device = device or torch.device("cpu")
        self._before: dict[str, tuple[Any, Any]] | None = None  # own and base values to undo to; None: nothing to undo

    def __getitem__(self, key: str) -> Any:
        if key in self._own:
            if self._before is not None and key not in self._before:  # the caller may edit it in place
                self._note(key, copy.deepcopy(self._own[key]))
            return self._own[key]
        value = self._base[key]
        self._note(key)
        own = value.to(self._device, copy=True) if isinstance(value, Tensor) else json.loads(json.dumps(value))
        self._own[key] = own
        return own

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_writable(key)
        if not isinstance(key, str):
            raise PluginContractError.of(self._plugin, f"sets state[{key!r}]", expected="a text as name")
        if not isinstance(value, Tensor):
            try:
                json.dumps(value)
                _check_keys(value)
            except (TypeError, ValueError) as error:
                found = f"sets state[{key!r}] to a {type(value).__name__} ({error})"
                raise PluginContractError.of(self._plugin, found, expected="a tensor or a JSON value") from None
        self._note(key)
        self._own[key] = value.detach().clone() if isinstance(value, Tensor) else value

    def __delitem__(self, key: str) -> None:
        self._check_writable(key)
        if key not in self:
            raise KeyError(key)
        self._note(key)
        self._own.pop(key, None)
        self._base.pop(key, None)

    def add(self, key: str, tensor: Tensor, *, weight: float = 1.0) -> None:
        """Add ``weight * tensor`` to a running sum in float64; a sum that is not there is 0.

        Cheaper in ``accumulate`` than reading the sum and adding in place: nothing is copied for the case that the
        update is rejected.

        :raises PluginContractError: the state holds something else under this name.
        :raises ValueError: the tensor's shape is not the sum's.
        """
        self._check_writable(key)
        tensor = tensor.detach().to(self._device)
        total = self._own.get(key, self._base.get(key))
        if total is None:
            self._note(key)
            self._own[key] = torch.zeros(tensor.shape, dtype=torch.float64, device=self._device)
            self._own[key].add_(tensor, alpha=weight)
            return
        if not isinstance(total, Tensor) or total.dtype != torch.float64:
            held = total.dtype if isinstance(total, Tensor) else type(total).__name__
            found = f"adds to state[{key!r}], which is {held}"
            raise PluginContractError.of(self._plugin, found, expected="a float64 tensor, as state.add makes it")
        if total.shape != tensor.shape:
            raise ValueError(f"state[{key!r}] is a sum of shape {tuple(total.shape)}, not {tuple(tensor.shape)}")
        in_place = key in self._own and (self._before is None or key in self._before)
        self._note(key)
        self._own[key] = total.add_(tensor, alpha=weight) if in_place else torch.add(total, tensor, alpha=weight)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._own})

    def __len__(self) -> int:
        return len({**self._base, **self._own})

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            found = f"changes state[{key!r}], but state is read-only in {self._read_only}"
            raise PluginContractError.of(self._plugin, found)

    def _note(self, key: str, own: Any = _ABSENT) -> None:
        """Note what a name held before its first change, or its first reading, since :meth:`begin`."""
        if self._before is not None and key not in self._before:
            held = self._own.get(key, _ABSENT) if own is _ABSENT else own
            self._before[key] = held, self._base.get(key, _ABSENT)

    def begin(self) -> None:
        """Note from here on what :meth:`undo` needs: only what is read or written is copied."""
        self._before = {}

    def end(self) -> None:
        """Keep what was written since :meth:`begin`."""
        self._before = None

    def undo(self) -> None:
        """Undo what was written since :meth:`begin`."""
        for key, values in (self._before or {}).items():
            for place, value in zip((self._own, self._base), values, strict=True):
                place.pop(key, None)
                if value is not _ABSENT:
                    place[key] = value
        self._before = None

    def values_to_keep(self) -> dict[str, Any]:
        """Return what the next version holds."""
        return {**self._base, **({} if self._read_only else self._own)}


def _check_keys(value: Any) -> None:
    """Refuse mappings whose keys are no texts, which they would be when they are read again.

    :raises TypeError: names the key.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"its key {key!r} would be the text {str(key)!r} when it is read again")
            _check_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner)


class States:
    """The states of all plugins of one client or of the server, each its own namespace."""

    def __init__(
        self,
        saved: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        read_only: str = "",
        device: torch.device | None = None,
    ) -> None:
        self._saved = saved or {}
        self._read_only, self._device = read_only, device
        self._open: dict[str, State] = {}

    def of(self, plugin: str) -> State:
        """Return a plugin's state."""
        if plugin not in self._open:
            self._open[plugin] = State(
                self._saved.get(plugin), plugin=plugin, read_only=self._read_only, device=self._device
            )
        return self._open[plugin]

    @contextmanager
    def undone_on_error(self, plugins: Iterable[str]) -> Iterator[None]:
        """Undo what these plugins write inside the block if it raises."""
        states = [self.of(plugin) for plugin in plugins]
        for state in states:
            state.begin()
        try:
            yield
        except BaseException:
            for state in states:
                state.undo()
            raise
        for state in states:
            state.end()

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return everything the next version holds, by plugin."""
        kept = {plugin: dict(values) for plugin, values in self._saved.items()}
        kept.update({plugin: state.values_to_keep() for plugin, state in self._open.items()})
        return {plugin: values for plugin, values in sorted(kept.items()) if values}
