"""Bytes sent down and up, by sender: the model or a plugin."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


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
