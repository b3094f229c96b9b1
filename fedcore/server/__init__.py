"""One round on the server: cohort, exchange, validation of updates, aggregation, commit.

The names below are for tests of engines and of aggregation. They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy

if TYPE_CHECKING:
    from fedcore.server.round import Notify as Notify
    from fedcore.server.scope import Federation as Federation
    from fedcore.server.scope import Round as Round
    from fedcore.server.scope import ServerScope as ServerScope
    from fedcore.server.state import ServerState as ServerState
    from fedcore.server.system import UNREACHED as UNREACHED

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
