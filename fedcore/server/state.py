"""The committed state of a run on the server, the versions of the clients' states, and the count of the bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

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
    outliers: Mapping[str, float] = field(default_factory=dict)
    """Client -> the largest value in its last update, if that is far above the other clients'; of the last round."""
    stopped: bool = False
    """Whether ``on_round`` ended the training before its last round."""


class Ledger(Counter[tuple[str, Literal["down", "up"]]]):
    """Counts bytes to clients (``down``) and from them (``up``), by sender, of one round or of a whole run."""

    @classmethod
    def of(cls, totals: Mapping[str, Any]) -> Self:
        """Return the ledger that :meth:`as_json` described."""
        by_plugin = totals.get("by_plugin", {})
        return cls({(sender, way): n for sender, counts in by_plugin.items() for way, n in counts.items()})

    def as_json(self) -> dict[str, Any]:
        """Return totals and counts by sender. The sender of the model's own traffic is ``model``."""
        senders = sorted({sender for (sender, _), size in self.items() if size})
        by_plugin = {sender: {"down": self[sender, "down"], "up": self[sender, "up"]} for sender in senders}
        return {
            "down": sum(counts["down"] for counts in by_plugin.values()),
            "up": sum(counts["up"] for counts in by_plugin.values()),
            "by_plugin": by_plugin,
        }
