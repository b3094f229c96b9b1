"""Participation of clients, read from the records of a run with a simulated system. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

SIMULATED = ("unavailable", "dropped", "deadline")
"""Kinds of failures that the simulated system produces; they are results, not errors."""


def lost(record: Mapping[str, Any]) -> dict[str, int]:
    """Return by kind how many selected clients of a round gave no update; each counts once."""
    cohort = set(record["cohort"])
    kinds = {failure["client"]: failure["kind"] for failure in record["failures"] if failure["client"] in cohort}
    return dict(sorted(Counter(kinds.values()).items()))


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over a run's rounds: selections, updates used, how many of those were partial, and losses."""
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
    """Return how many clients an evaluation left out, with the first reason; empty where it has them all."""
    failures = metrics.get("failures") or []
    if not failures:
        return ""
    others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    left_out = f"client {failures[0]['client']}{others} could not be evaluated by every protocol"
    return f"{left_out}: {failures[0]['message']}"
