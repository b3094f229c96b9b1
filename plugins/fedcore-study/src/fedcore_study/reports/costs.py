"""Accuracy against what it took: bytes sent, and seconds on the clock of a simulated system. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from fedcore.base.protocols import EVALUATED, PROTOCOLS
from fedcore_study.comparisons.groups import Group
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.reports.charts import Chart, Curves, number
from fedcore_study.reports.lines import figure_of, how, lines_of, over_rounds, scaled
from fedcore_study.reports.shares import MB


def against_costs(group: Group, colors: Mapping[str, int]) -> Iterator[Chart]:
    """Yield the accuracy against bytes, and against virtual time where a simulated system recorded it.

    Of the protocol that most rows have figures for; nothing before the first evaluation.
    """
    rows = {name: sum(any(name in run.protocols for run in runs) for runs in group.rows.values()) for name in EVALUATED}
    protocol = max(EVALUATED, key=lambda name: rows[name])

    def accuracy(run: RunRecord) -> dict[int, float]:
        return over_rounds(run, lambda line: scaled(figure_of(line, protocol, "accuracy"), 100))

    for name, title, x_title, places, of in (
        (
            "bytes",
            "bytes",
            "MB sent, down and up",
            megabytes,
            "the bytes that all clients received and sent until then",
        ),
        ("time", "virtual time", "virtual seconds", virtual_seconds, "the clock of the simulated system (--system)"),
    ):
        lines = lines_of(group, colors, accuracy, places)
        if lines:
            yield Curves(
                name=f"accuracy-{name}",
                title=f"Accuracy against {title}, {protocol}",
                about=f"Accuracy of {PROTOCOLS[protocol].measures} over {of}. {how(lines)}",
                x_title=x_title,
                y_title="accuracy %",
                lines=lines,
                rounds=False,
            )


def megabytes(run: RunRecord) -> dict[int, float]:
    """Return the MB sent down and up together after each number of rounds."""
    spent = accumulate(line["bytes"]["down"] + line["bytes"]["up"] for line in run.rounds)
    return {line["round"] + 1: total / MB for line, total in zip(run.rounds, spent, strict=True)}


def virtual_seconds(run: RunRecord) -> dict[int, float]:
    """Return the simulated system's clock after each number of rounds; empty without one."""

    def read(line: Mapping[str, Any]) -> float | None:
        return number(line.get("virtual_time"))

    return over_rounds(run, read)
