"""A plugin's state between rounds: named tensors and JSON values, of a client or of the server.

Client state is versioned by round. A task names the version to start from; the client writes a new one and
never edits an old one. Which version counts is decided by the server's manifest, when the round commits, so
a repeated, late, rejected or lost task changes nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from fedcore.base.errors import PluginContractError

SEPARATOR = "/"


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

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            value = self._base[key]
            own = value.to(self._device, copy=True) if isinstance(value, Tensor) else json.loads(json.dumps(value))
            self._own[key] = own
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_writable(key)
        if not isinstance(value, Tensor):
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                found = f"sets state[{key!r}] to a {type(value).__name__} ({error})"
                raise PluginContractError.of(self._plugin, found, expected="a tensor or a JSON value") from None
        self._own[key] = value.detach().clone() if isinstance(value, Tensor) else value

    def __delitem__(self, key: str) -> None:
        self._check_writable(key)
        if key not in self:
            raise KeyError(key)
        self._own.pop(key, None)
        self._base.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._own})

    def __len__(self) -> int:
        return len({**self._base, **self._own})

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            found = f"changes state[{key!r}], but state is read-only in {self._read_only}"
            raise PluginContractError.of(self._plugin, found)

    def savepoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what :meth:`restore` needs to undo what is written from here on."""
        return dict(self._base), copy.deepcopy(self._own)

    def restore(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Undo what was written since the savepoint."""
        self._base, self._own = saved

    def values_to_keep(self) -> dict[str, Any]:
        """Return what the next version holds."""
        return {**self._base, **({} if self._read_only else self._own)}


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

    def savepoint(self, plugins: Iterable[str]) -> dict[str, Any]:
        """Return what :meth:`restore` needs to undo what these plugins write from here on."""
        return {plugin: self.of(plugin).savepoint() for plugin in plugins}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Undo what was written since the savepoint."""
        for plugin, state in saved.items():
            self.of(plugin).restore(state)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return everything the next version holds, by plugin."""
        kept = {plugin: dict(values) for plugin, values in self._saved.items()}
        kept.update({plugin: state.values_to_keep() for plugin, state in self._open.items()})
        return {plugin: values for plugin, values in sorted(kept.items()) if values}


def flatten(
    namespaces: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Split nested states into tensors named ``plugin/key`` and the JSON rest."""
    tensors = {
        f"{plugin}{SEPARATOR}{key}": value
        for plugin, values in namespaces.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    rest = {
        plugin: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for plugin, values in namespaces.items()
    }
    return tensors, {plugin: values for plugin, values in rest.items() if values}


def unflatten(tensors: Mapping[str, Tensor], rest: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Join what :func:`flatten` split."""
    namespaces: dict[str, dict[str, Any]] = {plugin: dict(values) for plugin, values in (rest or {}).items()}
    for name, tensor in tensors.items():
        plugin, _, key = name.partition(SEPARATOR)
        namespaces.setdefault(plugin, {})[key] = tensor
    return namespaces
