"""The committed state of a run on the server, the versions of the clients' states, and the count of the bytes sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Manifest = Mapping[int, "int | None"]
"""Client that took part -> the version of its state; None if it keeps nothing."""


@dataclass
class ServerState:
    """The state that a round commits. A checkpoint holds it."""

    model: dict[str, Tensor]
    """The global model w_t. Personal parameters have their initial values."""
    round: int = 0
    """The next round to run."""
    phase: str = "train"
    """``train``, ``post_train`` or ``done``."""
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The server states, by plugin."""
    manifest: Manifest = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    """Totals of bytes; see :meth:`Ledger.as_json`."""
    best: dict[str, Any] = field(default_factory=dict)
    """The best round so far by the validation protocol."""
    before_correction: dict[str, Any] | None = None
    """The metrics of the global model before ``post_train`` changed it."""
    metrics_bytes: int = 0
    """The length of the part of metrics.jsonl that belongs to the committed rounds."""
    virtual_time: float = 0.0
    """Seconds on the clock of the simulated system."""
    stopped: bool = False
    """Whether ``on_round`` ended the training before its last round."""


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
        """Return totals and counts by sender. The sender of the model's own traffic is ``model``."""
        by_plugin = {sender: dict(counts) for sender, counts in sorted(self._by.items()) if any(counts.values())}
        return {
            "down": sum(counts["down"] for counts in by_plugin.values()),
            "up": sum(counts["up"] for counts in by_plugin.values()),
            "by_plugin": by_plugin,
        }
