"""The server's work after the last round: hooks correct the final global model."""

from __future__ import annotations

from typing import Any

from fedcore.server.context import ScopeContext
from fedcore.server.scope import Federation, ServerScope
from fedcore.server.state import ServerState


def run_post_train(
    federation: Federation, committed: ServerState
) -> tuple[ServerState, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run every ``post_train``; returns the state to commit, the clients' failures and the ignored outcomes."""
    with ServerScope(federation, committed, committed.round, "post_train") as scope:
        federation.setup.plugins.call_all("post_train", server=ScopeContext(scope))
    return scope.commit(), scope.failures, scope.ignored
