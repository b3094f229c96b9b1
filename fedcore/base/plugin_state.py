"""A plugin's state between rounds: named tensors and JSON values, of a client or of the server.

Client state is versioned by round. A task names the version to start from. The client writes a new version and never
edits an old one. The server's manifest decides which version counts when the round commits. A repeated, late, rejected
or lost task therefore changes nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fedcore.base.errors import PluginContractError


class State(MutableMapping[str, Any]):
    """One plugin's named tensors and JSON values. Mappings in it have texts as keys: ``str(client)`` for a client.

    Reading a tensor gives this state's own copy. An edit in place reaches the next version only, never the committed
    one.
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
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None  # own and base values to go back to

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            base = self._base[key]
            copied = base.to(self._device, copy=True) if isinstance(base, Tensor) else json.loads(json.dumps(base))
            self._own[key] = copied
        elif self._is_from_before(key):  # the caller may edit it in place
            own = self._own[key]
            self._own[key] = own.clone() if isinstance(own, Tensor) else copy.deepcopy(own)
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_writable(key)
        if not isinstance(key, str):
            raise PluginContractError.of(self._plugin, f"sets state[{key!r}]", expected="a text as name")
        self._check_value(key, value)
        self._own[key] = value.detach().clone() if isinstance(value, Tensor) else value

    def __delitem__(self, key: str) -> None:
        self._check_writable(key)
        if key not in self:
            raise KeyError(key)
        self._own.pop(key, None)
        self._base.pop(key, None)

    def add(self, key: str, tensor: Tensor, *, weight: float = 1.0) -> None:
        """Add ``weight * tensor`` to a running sum in float64. A missing sum starts at 0.

        In ``accumulate`` this is cheaper than reading the sum and adding in place. Reading makes a copy for the case
        that the update is rejected.

        :raises PluginContractError: the state holds another kind of value under this name.
        :raises ValueError: the tensor's shape is not the sum's.
        """
        self._check_writable(key)
        tensor = tensor.detach().to(self._device)
        total = self._own.get(key, self._base.get(key))
        if total is None:
            self._own[key] = torch.zeros(tensor.shape, dtype=torch.float64, device=self._device)
            self._own[key].add_(tensor, alpha=weight)
            return
        if not isinstance(total, Tensor) or total.dtype != torch.float64:
            kind = total.dtype if isinstance(total, Tensor) else type(total).__name__
            fault = f"adds to state[{key!r}], which is {kind}"
            raise PluginContractError.of(self._plugin, fault, expected="a float64 tensor, as state.add makes it")
        if total.shape != tensor.shape:
            raise ValueError(f"state[{key!r}] is a sum of shape {tuple(total.shape)}, not {tuple(tensor.shape)}")
        in_place = key in self._own and not self._is_from_before(key)
        self._own[key] = total.add_(tensor, alpha=weight) if in_place else torch.add(total, tensor, alpha=weight)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._own})

    def __len__(self) -> int:
        return len({**self._base, **self._own})

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            fault = f"changes state[{key!r}], but state is read-only in {self._read_only}"
            raise PluginContractError.of(self._plugin, fault)

    def _check_value(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            return
        try:
            json.dumps(value)
            _check_keys(value)
        except (TypeError, ValueError) as error:
            fault = f"sets state[{key!r}] to a {type(value).__name__} ({error})"
            holds_tensors = any(f"type {kind}" in str(error) for kind in ("Tensor", "Parameter"))
            hint = f"give each tensor a name: state[f'{key}/{{i}}'] = tensor" if holds_tensors else ""
            raise PluginContractError.of(self._plugin, fault, expected="a tensor or a JSON value", hint=hint) from None

    def _is_from_before(self, key: str) -> bool:
        """Return whether :meth:`undone_on_error` needs an own value as it is."""
        return self._before is not None and self._own[key] is self._before[0].get(key)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """If the block raises, undo the changes that were made in it."""
        self._before = before = dict(self._own), dict(self._base)
        try:
            yield
        except BaseException:
            self._own, self._base = before
            raise
        finally:
            self._before = None

    def values_to_keep(self) -> dict[str, Any]:
        """Return the values of the next version.

        :raises PluginContractError: an edit in place left a value that is neither a tensor nor JSON.
        """
        own = {} if self._read_only else self._own
        for key, value in own.items():
            self._check_value(key, value)
        return {**self._base, **own}


def _check_keys(value: Any) -> None:
    """Refuse mappings with keys that are not texts: JSON would read them back as texts.

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
    """The states of all plugins of one client or of the server. Each plugin has a namespace of its own."""

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
        """If the block raises, undo the changes that these plugins made in it."""
        with ExitStack() as stack:
            for plugin in plugins:
                stack.enter_context(self.of(plugin).undone_on_error())
            yield

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return the values of the next version, by plugin."""
        by_plugin = {plugin: dict(values) for plugin, values in self._saved.items()}
        by_plugin.update({plugin: state.values_to_keep() for plugin, state in self._open.items()})
        return {plugin: values for plugin, values in sorted(by_plugin.items()) if values}
