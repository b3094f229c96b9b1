"""The messages between the server and its clients: tasks, results, failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

TaskKind = Literal["fit_begin", "fit_resume", "ask", "evaluate", "end_session", "bundle"]
BUNDLE: TaskKind = "bundle"
"""A task of the local engine that holds others (:mod:`fedcore.engines.bundles`); no client sees one."""


FailureKind = Literal[
    "raised",
    "timeout",
    "worker_lost",
    "session_lost",
    "unreachable",
    "rejected",
    "diverged",
    "no_steps",
    "unavailable",
    "dropped",
    "deadline",
]
"""Why a task has no result; ``diverged`` is a loss, a model or a payload that is not finite. The last three come from
the simulated system (:mod:`fedcore.server.system`)."""


@dataclass(frozen=True)
class ClientTask:
    """One piece of work for one client.

    :param id: unique in a run; the server matches results and drops duplicates by it.
    :param session: name of the client's training between ``fit_begin`` and its last ``fit_resume``.
    :param version: of the client's state to start from; None for the empty one.
    :param shared: key of the shared payload, which the engine received with ``share``.
    :param tensors: may be computed at each reading, so that no more tasks' tensors are in memory than are sent at once:
        an engine reads them once, when it sends the task (:func:`fedcore.client.packing.pack_task`).
    """

    id: str
    kind: TaskKind
    client: int
    round: int
    session: str | None = None
    version: int | None = None
    shared: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResult:
    """The result of a task: named tensors and JSON."""

    task_id: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientFailure:
    """The reason why a task has no result."""

    task_id: str
    kind: FailureKind
    message: str


Outcome = ClientResult | ClientFailure
