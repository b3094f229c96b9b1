"""Engines run client tasks and stream back outcomes. They know nothing of methods.

An engine takes a :class:`ClientSite` and implements :class:`Engine`. A worker makes a :class:`ClientRuntime` from the
site and lets it handle tasks. ``dumps`` and ``loads`` turn tensors and JSON into bytes and back; the package
fedcore-workers turns messages into tensors and JSON and back.

The names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy
from fedcore.base.process import importing

with importing():  # at once: a worker process begins here
    from fedcore.client.runtime import ClientRuntime as ClientRuntime

if TYPE_CHECKING:
    from fedcore.base.process import cores as cores
    from fedcore.base.seeding import nobody_draws_outside as nobody_draws_outside
    from fedcore.base.serial import dumps as dumps
    from fedcore.base.serial import loads as loads
    from fedcore.base.tensors import flatten as flatten
    from fedcore.base.tensors import unflatten as unflatten
    from fedcore.client.messages import ClientFailure as ClientFailure
    from fedcore.client.messages import ClientSite as ClientSite
    from fedcore.client.messages import ClientTask as ClientTask
    from fedcore.client.messages import Engine as Engine
    from fedcore.client.messages import Evaluation as Evaluation
    from fedcore.client.messages import FailureKind as FailureKind
    from fedcore.client.messages import Outcome as Outcome
    from fedcore.client.messages import Pair as Pair
    from fedcore.client.messages import Pause as Pause
    from fedcore.client.messages import Reply as Reply
    from fedcore.client.messages import SharedPayload as SharedPayload
    from fedcore.engines.in_process import InProcessEngine as InProcessEngine
    from fedcore.engines.in_process import LocalEngine as LocalEngine
    from fedcore.engines.in_process import alike as alike
    from fedcore.engines.in_process import groups_of as groups_of

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
