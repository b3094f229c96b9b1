"""What plugins send down beside the model: once for all clients, or to each client its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

from fedcore.base.errors import PluginContractError
from fedcore.base.state import States
from fedcore.base.tensors import bytes_of, flatten
from fedcore.base.types import Tensors
from fedcore.server.context import RoundContext, ScopeContext
from fedcore.server.scope import Round, ServerScope


class Broadcasts:
    """The broadcasts of one round or evaluation, shared under a key when this is made.

    ``broadcast_to`` is called when an engine sends a client's task, so that no more messages are in memory than tasks
    are sent at once. Updates arrive in the meantime: the hook sees the server as it is when
    this is made, whenever it is called.
    """

    def __init__(self, scope: ServerScope, key: str) -> None:
        plugins = scope.federation.setup.plugins
        self._scope, self._plugins = scope, plugins
        self._own = [plugin.name for plugin in plugins.implementers("broadcast_to")]
        sent = {plugin.name: dict(found or {}) for plugin, found in plugins.each("broadcast", server=_context(scope))}
        self._to_all = {plugin: tensors for plugin, tensors in sent.items() if tensors}
        scope.share(key, self._to_all)
        self._sizes: dict[int, dict[str, int]] = {}
        if self._own:
            self._state = scope.states.snapshot()
            scope.states = States(self._state)  # what is written from here on reaches copies
            self._seen = copy.copy(scope)
            if isinstance(self._seen, Round):
                self._seen.accepted = []

    def to(self, client: int) -> Callable[[], Tensors] | None:
        """Return what makes the tensors of a client's task, named ``plugin/name``; None without any."""
        return partial(self._message, client) if self._own else None

    def count(self, clients: Iterable[int]) -> None:
        """Count the bytes of these clients' own messages, each once; those that no engine has read are computed."""
        for client in clients if self._own else ():
            if client not in self._sizes:
                self._message(client)
            for plugin, size in self._sizes[client].items():
                self._scope.ledger.down(plugin, size)

    def _message(self, client: int) -> Tensors:
        self._seen.states = States(self._state, read_only="broadcast_to")  # anew, so that no call sees an earlier one's
        context = _context(self._seen)
        found = self._plugins.each("broadcast_to", server=context, client=client)
        sent = {plugin.name: tensors or {} for plugin, tensors in found}
        for plugin, tensors in sent.items():
            if twice := sorted(set(tensors).intersection(self._to_all.get(plugin, {}))):
                clash = f"sends {twice[0]!r}, which broadcast sends to all clients"
                raise PluginContractError.of(plugin, clash, hook="broadcast_to", client=client)
        self._sizes[client] = {name: bytes_of(tensors) for name, tensors in sent.items()}
        return flatten(sent)[0]


def _context(scope: ServerScope) -> ScopeContext:
    return RoundContext(scope) if isinstance(scope, Round) else ScopeContext(scope)
