"""What plugins send down beside the model: once for all clients, or to each client its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

from fedcore.base.tensors import bytes_of, flatten
from fedcore.base.types import Tensors
from fedcore.server.context import RoundContext, ScopeContext
from fedcore.server.scope import Round, ServerScope
from fedcore.storage.state import States


class Broadcasts:
    """The broadcasts of one round or evaluation, shared under a key when this is made.

    A ``broadcast`` that takes ``client`` is called when an engine sends that client's task, so that no more messages
    are in memory than tasks are sent at once. Updates arrive in the meantime: the hook sees the server as it is when
    this is made, whenever it is called.
    """

    def __init__(self, scope: ServerScope, key: str) -> None:
        plugins = scope.federation.setup.plugins
        self._scope, self._plugins = scope, plugins
        self._own = [plugin.name for plugin in plugins.takers("broadcast", "client")]
        for_all: dict[str, Tensors] = {}
        for plugin in plugins.implementers("broadcast"):
            if plugin.name not in self._own:
                sent = plugins.call(plugin.name, "broadcast", server=_context(scope))
                for_all.update({plugin.name: dict(sent)} if sent else {})
        scope.share(key, for_all)
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
        self._seen.states = States(self._state, read_only="broadcast")  # anew, so that no call sees an earlier one's
        context = _context(self._seen)
        sent = {name: self._plugins.call(name, "broadcast", server=context, client=client) or {} for name in self._own}
        self._sizes[client] = {name: bytes_of(tensors) for name, tensors in sent.items()}
        return flatten(sent)[0]


def _context(scope: ServerScope) -> ScopeContext:
    return RoundContext(scope) if isinstance(scope, Round) else ScopeContext(scope)
