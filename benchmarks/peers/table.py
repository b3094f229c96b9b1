"""From the runners' JSON lines to one table of ratios to the reference of the same run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedcore_bench.measure import Spread

REFERENCE = "reference"
WARM_UP = 1


class NoResult(Exception):
    """A runner's output holds no usable JSON line; the message says what is wrong."""


@dataclass(frozen=True)
class Run:
    """One runner's run of one workload.

    :param block: runs of one block were made one after the other and are compared with each other.
    :param seconds: per round, after the warm-up.
    :param start_up: seconds from the process's start to the first batch.
    :param total: seconds from the process's start to its end.
    :param peak_mib: most memory of all its processes together, sampled; ``peak_rss_mib`` of its main process alone.
    :param error: why there is no result; the figures are then empty.
    :param timed_out: it was stopped. The side does not run again in this workload.
    """

    workload: str
    side: str
    block: int
    seconds: Sequence[float] = ()
    start_up: float | None = None
    total: float | None = None
    accuracy: float | None = None
    peak_mib: float | None = None
    peak_rss_mib: float | None = None
    error: str | None = None
    timed_out: bool = False

    @property
    def peak(self) -> float | None:
        """Most memory that is known: between two samples, one process may reach more than all did in any."""
        return max((peak for peak in (self.peak_mib, self.peak_rss_mib) if peak is not None), default=None)


@dataclass(frozen=True)
class Row:
    """One line of the table: a side's runs of a workload.

    :param ratio: of the typical round to the reference's, per block.
    :param mean_ratio: the same of the mean round, so with the evaluations' share.
    """

    workload: str
    side: str
    rounds: int
    seconds: Spread | None
    ratio: Spread | None
    mean_ratio: Spread | None
    start_up: float | None
    total: float | None
    accuracy: float | None
    peak: float | None
    error: str | None


def parse(output: str, rounds: int) -> dict[str, Any]:
    """Return the fields of :class:`Run` in a runner's output: the last line that is its JSON; peers print others.

    :raises NoResult: there is none, or it has another number of rounds.
    """
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "seconds" in found:
            break
    else:
        raise NoResult("it printed no result")
    if len(found["seconds"]) != rounds:
        raise NoResult(f"it timed {len(found['seconds'])} rounds, not {rounds}")
    return {
        "seconds": found["seconds"][WARM_UP:],
        "start_up": found["start_up"],
        "accuracy": found["accuracy"],
        "peak_rss_mib": found["peak_rss_mib"],
    }


def rows(runs: Iterable[Run]) -> list[Row]:
    """Return one row per workload and side, in the order of their first runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.side), []).append(run)
    return [_row(group, groups.get((workload, REFERENCE), [])) for (workload, _), group in groups.items()]


def _row(group: list[Run], reference: list[Run]) -> Row:
    good = [run for run in group if run.error is None]
    limits = {run.block: run for run in reference if run.error is None}
    pairs = [(run, limits[run.block]) for run in good if run.block in limits]
    seconds = [value for run in good for value in run.seconds]

    def ratio(summary: Any) -> Spread | None:
        return Spread.of([summary(run.seconds) / summary(limit.seconds) for run, limit in pairs]) if pairs else None

    def median(name: str) -> float | None:
        found = [value for run in good if (value := getattr(run, name)) is not None]
        return statistics.median(found) if found else None

    return Row(
        group[0].workload,
        group[0].side,
        len(seconds),
        Spread.of(seconds) if seconds else None,
        ratio(typical),
        ratio(statistics.fmean),
        *(median(name) for name in ("start_up", "total", "accuracy", "peak")),
        next((run.error for run in group if run.error), None),
    )


def typical(seconds: Sequence[float]) -> float:
    """Return the median round, without the last one, after which all sides evaluate."""
    return statistics.median(seconds[:-1] or seconds)


def strayed(table: Sequence[Row], tolerance: float = 0.05) -> list[str]:
    """Return a remark for each side whose accuracy is far from its reference's: it may not have done the same work."""
    limits = {row.workload: row.accuracy for row in table if row.side == REFERENCE}
    remarks = []
    for row in table:
        limit = limits.get(row.workload)
        if row.accuracy is not None and limit is not None and abs(row.accuracy - limit) > tolerance:
            remarks.append(f"{row.workload} {row.side}: accuracy {row.accuracy:.3f}, the reference's {limit:.3f}")
    return remarks


HEADER = (
    "workload", "side", "s per round", "ratio", "ratio of means", "start-up s", "total s", "accuracy", "memory MiB",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text."""
    return (
        row.workload,
        row.side,
        _spread(row.seconds) if row.seconds else f"failed: {row.error}",
        _spread(row.ratio),
        _spread(row.mean_ratio),
        _number(row.start_up, ".1f"),
        _number(row.total, ".1f"),
        _number(row.accuracy, ".3f"),
        _number(row.peak, ",.0f"),
    )


def markdown(table: Iterable[Row]) -> str:
    """Return the table in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *(cells(row) for row in table)]
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines)


def as_json(table: Iterable[Row], runs: Iterable[Run], about: dict[str, Any]) -> str:
    """Return the rows, the runs behind them and what is known of the machine."""
    content = {"about": about, "rows": [asdict(row) for row in table], "runs": [asdict(run) for run in runs]}
    return json.dumps(content, indent=2)


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.least == spread.greatest:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.least:.2f}-{spread.greatest:.2f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
