"""The committed state of a run on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class ServerState:
    """What a round commits; a checkpoint holds it.

    :param round: the next round to run.
    :param phase: ``train``, ``post_train`` or ``done``.
    :param model: the global model w_t, personal names at their initial values.
    :param plugins: server state by plugin.
    :param manifest: for every client that took part, the version of its state; None where it keeps nothing.
    :param ledger: totals of bytes, see :meth:`fedcore.server.ledger.Ledger.as_json`.
    :param best: the best round so far by the validation protocol.
    :param before_correction: metrics of the global model before ``post_train`` changed it.
    :param virtual_time: seconds on the clock of the simulated system.
    :param metrics_bytes: length of metrics.jsonl that belongs to the committed rounds.
    """

    model: dict[str, Tensor]
    round: int = 0
    phase: str = "train"
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    manifest: Mapping[int, int | None] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    before_correction: dict[str, Any] | None = None
    metrics_bytes: int = 0
    virtual_time: float = 0.0
