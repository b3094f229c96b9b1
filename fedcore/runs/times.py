"""Means per round: the measured seconds of each part of a round, and the bytes of a ledger."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any

PARTS = (
    "round",
    "selection",
    "broadcast",
    "local_training",
    "collection",
    "aggregation",
    "evaluation",
    "checkpoint",
    "client_seconds",
    "idle_workers",
)
"""The parts of a round that are timed, in seconds.

``checkpoint`` is the time for which the round waited for the previous checkpoint, which is written while the round
trains. ``client_seconds`` and ``idle_workers`` are summed over the workers.
"""


class RoundTimes:
    """The seconds of the rounds that this process ran."""

    def __init__(self) -> None:
        self.rounds = 0
        self._seconds: dict[str, float] = {}
        self._plugins: dict[str, float] = {}

    def add(self, seconds: Mapping[str, Any]) -> None:
        """Add a round: seconds by part, and by plugin under ``plugin_terms``."""
        self.rounds += 1
        for totals, spent in ((self._seconds, seconds), (self._plugins, seconds["plugin_terms"])):
            for name in spent.keys() - {"plugin_terms"}:
                totals[name] = totals.get(name, 0.0) + spent[name]

    def split(self, workers: int) -> dict[str, Any]:
        """Return the mean seconds per round by part, the rounds, the workers, and the peak of memory in MiB."""
        rounds = max(1, self.rounds)
        means: dict[str, Any] = {part: self._seconds.get(part, 0.0) / rounds for part in PARTS}
        means["plugin_terms"] = {name: total / rounds for name, total in sorted(self._plugins.items())}
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
        return {"per_round": means, "rounds": self.rounds, "workers": workers, "peak_memory_mib": kilobytes / 1024}


def has_times(earlier: Mapping[str, Any], summary: Mapping[str, Any]) -> bool:
    """Whether an earlier summary, which another version may have written, has the times that a summary has now."""
    spent, wanted = earlier.get("time"), summary["time"]
    if not (isinstance(spent, dict) and isinstance(spent.get("per_round"), dict)):
        return False
    each = spent["per_round"]
    terms = each.get("plugin_terms")
    numbers = [earlier.get("seconds"), spent.get("workers"), spent.get("peak_memory_mib")]
    numbers += [each.get(part) for part in wanted["per_round"] if part != "plugin_terms"]
    numbers += terms.values() if isinstance(terms, dict) else [None]
    return all(isinstance(number, (int, float)) for number in numbers)


def per_round(ledger: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return a ledger's totals and its counts by sender, divided by the number of rounds."""

    def each(counts: Mapping[str, Any]) -> dict[str, Any]:
        return {direction: counts.get(direction, 0) / max(1, rounds) for direction in ("down", "up")}

    senders = ledger.get("by_plugin", {})
    return {**each(ledger), "by_plugin": {sender: each(counts) for sender, counts in senders.items()}}
