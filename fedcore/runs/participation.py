"""Participation of clients, read from the records of a run with a simulated system. This module imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

SIMULATED = ("unavailable", "dropped", "deadline")
"""The kinds of failures that the simulated system produces. They are results, not errors."""


def lost(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of selected clients without an update in a round, by kind. Each client counts once."""
    cohort = set(record["cohort"])
    kinds = {failure["client"]: failure["kind"] for failure in record["failures"] if failure["client"] in cohort}
    return dict(sorted(Counter(kinds.values()).items()))


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over a run's rounds: selected clients, used updates, partial updates among these, losses."""
    selected = accepted = partial = 0
    kinds: Counter[str] = Counter()
    clock = 0.0
    for record in records:
        if "system" in record:
            selected += len(record["cohort"])
            accepted += record["accepted"]
            partial += len(record["system"]["partial"])
            kinds.update(lost(record))
            clock = record["virtual_time"]
    return {
        "selected": selected,
        "accepted": accepted,
        "partial": partial,
        "lost": dict(sorted(kinds.items())),
        "virtual_time": clock,
    }


def in_words(selected: int, accepted: int, partial: int, losses: Mapping[str, int]) -> str:
    """Return the participation as a short text: ``5 of 8 clients (1 partial; 2 dropped)``."""
    parts = [f"{partial} partial"] if partial else []
    if losses:
        parts.append(", ".join(f"{count} {kind}" for kind, count in losses.items()))
    notes = "; ".join(parts)
    return f"{accepted} of {selected} clients" + (f" ({notes})" if notes else "")


def not_evaluated(metrics: Mapping[str, Any]) -> str:
    """Return how many clients an evaluation left out, with the first reason; empty if it left out none."""
    failures = metrics.get("failures") or []
    if not failures:
        return ""
    others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    left_out = f"client {failures[0]['client']}{others} could not be evaluated by every protocol"
    return f"{left_out}: {failures[0]['message']}"
