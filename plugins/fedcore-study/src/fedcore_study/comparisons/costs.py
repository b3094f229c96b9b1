"""The costs of a run: time, bytes, memory, privacy. Each figure is of the whole run, or of its first rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedcore.tools import rounds as recorded
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.lenient import mapping_in, number


class Cost(NamedTuple):
    """A cost as tables show it."""

    heading: str
    measured: Callable[[RunRecord, int | None], float | None]
    """The cost of a run, or of so many rounds of it; None if it is not recorded."""
    digits: int
    """Decimal places."""


def timed_rounds(run: RunRecord, rounds: int | None = None) -> Sequence[Mapping[str, Any]]:
    """Return the records of the rounds by which a run's seconds per round are counted: without the first of several.

    The first round also starts processes.
    """
    timed = [line for line in run.rounds[:rounds] if "round" in mapping_in(line, "time")]
    return timed[1:] or timed


def seconds_per_round(run: RunRecord, rounds: int | None = None) -> float | None:
    """Return the mean seconds of a round, its evaluation included, over :func:`timed_rounds`."""
    timed = timed_rounds(run, rounds)
    return fmean(map(recorded.seconds, timed)) if timed else None


def _seconds(run: RunRecord, rounds: int | None) -> float | None:
    timed = [line for line in run.rounds[:rounds] if "round" in mapping_in(line, "time")]
    return sum(map(recorded.seconds, timed)) if timed else None


def _megabytes(*ways: str) -> Callable[[RunRecord, int | None], float | None]:
    def sent(run: RunRecord, rounds: int | None) -> float | None:
        records = [run.summary] if run.summary and rounds is None else run.rounds[:rounds]
        return sum(float(record["bytes"][way]) for record in records for way in ways) / 1e6

    return sent


def _peak(run: RunRecord, rounds: int | None) -> float | None:
    return number(mapping_in(run.summary or {}, "time").get("peak_memory_mib"))


def _epsilon(run: RunRecord, rounds: int | None) -> float | None:
    reports = run.reports(rounds)
    spent = [number(mapping_in(reports, plugin).get("epsilon")) for plugin in reports]
    return max((value for value in spent if value is not None), default=None)


COSTS = {
    "s/round": Cost("s/round", seconds_per_round, 3),
    "seconds": Cost("seconds", _seconds, 1),
    "MB": Cost("MB", _megabytes("down", "up"), 2),
    "MB-down": Cost("MB down", _megabytes("down"), 2),
    "MB-up": Cost("MB up", _megabytes("up"), 2),
    "memory": Cost("MiB", _peak, 0),
    "epsilon": Cost("epsilon", _epsilon, 2),
}
"""The costs by the words of ``--columns``."""

EACH = ("s/round", "seconds", "MB-down", "MB-up", "memory", "epsilon")
"""The columns that the word ``costs`` of ``--columns`` stands for."""
