"""The committed state of a run on the server, and the count of the bytes sent."""

from __future__ import annotations

from collections import defaultdict
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
    :param ledger: totals of bytes, see :meth:`Ledger.as_json`.
    :param best: the best round so far by the validation protocol.
    :param before_correction: metrics of the global model before ``post_train`` changed it.
    :param virtual_time: seconds on the clock of the simulated system.
    :param outlier: a sentence about a client whose values were by far the largest in the last round; in no checkpoint.
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
    outlier: str = ""


class Ledger:
    """Counts bytes of one round or of a whole run."""

    def __init__(self, totals: dict[str, Any] | None = None) -> None:
        totals = totals or {}
        self._by: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"down": 0, "up": 0})
        for sender, counts in totals.get("by_plugin", {}).items():
            self._by[sender] = dict(counts)

    def down(self, sender: str, size: int) -> None:
        """Count bytes to one client."""
        self._by[sender]["down"] += size

    def up(self, sender: str, size: int) -> None:
        """Count bytes from one client."""
        self._by[sender]["up"] += size

    def add(self, other: Ledger) -> Ledger:
        """Add another ledger's counts."""
        for sender, counts in other._by.items():
            self._by[sender]["down"] += counts["down"]
            self._by[sender]["up"] += counts["up"]
        return self

    def as_json(self) -> dict[str, Any]:
        """Return totals and the split by sender; the traffic of the model itself is under ``model``."""
        by_plugin = {sender: dict(counts) for sender, counts in sorted(self._by.items()) if any(counts.values())}
        return {
            "down": sum(counts["down"] for counts in by_plugin.values()),
            "up": sum(counts["up"] for counts in by_plugin.values()),
            "by_plugin": by_plugin,
        }
