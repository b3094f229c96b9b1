"""The tensors that plugins send to clients next to the model: the same ones to all, or each client's own."""

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
    """The broadcasts of one round or evaluation. ``__init__`` shares them under a key.

    ``broadcast_to`` is called when an engine sends a client's task, so that only the messages of tasks in flight take
    memory. Updates arrive in the meantime. The hook sees the server as of ``__init__``, whenever it is called.
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
            scope.states = States(self._state)  # later writes reach copies, not this snapshot
            self._seen = copy.copy(scope)
            if isinstance(self._seen, Round):
                self._seen.accepted = []

    def to(self, client: int) -> Callable[[], Tensors] | None:
        """Return a function that makes the tensors of a client's task, named ``plugin/name``.

        :returns: None if no plugin has ``broadcast_to``.
        """
        return partial(self._message, client) if self._own else None

    def count(self, clients: Iterable[int]) -> None:
        """Count the bytes of these clients' own messages. Messages that no engine has sent are computed first."""
        for client in clients if self._own else ():
            if client not in self._sizes:
                self._message(client)
            for plugin, size in self._sizes[client].items():
                self._scope.ledger.down(plugin, size)

    def _message(self, client: int) -> Tensors:
        # New states for each call: an edit in place must not reach the next call.
        self._seen.states = States(self._state, read_only="broadcast_to")
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
