"""Flower's SuperLink, with its Control API open to its owner only.

Flower serves three interfaces on one port. SuperNodes use Fleet and sign their requests. Requests to Runtime have a
token. Control registers nodes and starts runs, and is open to every host that reaches the port. Here requests to
Control need the secret of the process that started the SuperLink.
"""

from __future__ import annotations

import hmac
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from fedcore_flower.child import installed_command

HEADER = "x-fedcore-secret"
SECRET_FILE = "--superexec-auth-secret-file"  # noqa: S105 - an option
"""Flower's option for the file with the secret, which its Runtime API also needs."""

OPEN = ("/v1/fleet/", "/v1/runtime/")
"""The interfaces that check their requests themselves."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class OwnerOnly:
    """Passes requests to the open interfaces and requests with the secret to the app. Answers all others with 403."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], secret: bytes) -> None:
        self._app, self._secret = app, secret.hex().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"for the owner of this SuperLink only\n"})

    def _admits(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        if scope["path"].startswith(OPEN):
            return True
        values = [value for name, value in scope["headers"] if name == HEADER.encode()]
        return len(values) == 1 and hmac.compare_digest(values[0], self._secret)


def main() -> None:
    """Run the command ``flower-superlink`` with its arguments.

    The command serves its app by ``uvicorn.run``. The server checks that requests without the secret are refused before
    it lets clients in.
    """
    import uvicorn

    serve, secret = uvicorn.run, Path(sys.argv[sys.argv.index(SECRET_FILE) + 1]).read_bytes()

    def run(app: Any, **options: Any) -> None:
        serve(OwnerOnly(app, secret), **{**options, "access_log": False, "timeout_graceful_shutdown": 2})

    uvicorn.run = run
    installed_command("flower-superlink")()
