"""What a round is made of, as bars in parts: clients that took part or not, bytes by sender, seconds by stage."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from fedcore.runs.participation import SIMULATED
from fedcore_study.comparisons.groups import Group
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.reports.charts import Bars, Chart, Omitted, Part, number, plain
from fedcore_study.reports.reading import list_in, mapping_in

TIMES = ("selection", "broadcast", "local_training", "collection", "aggregation", "evaluation")
"""What a round's seconds are made of; workers' idle time and the like are parts of these."""

MB = 1e6


def participation(group: Group) -> Iterator[Chart]:
    """Yield the outcomes of the selected clients, where a simulated system recorded them."""
    bars, columns = [], []
    for label, runs in group.rows.items():
        found = [fared for run in runs if (fared := _fared(run))]
        if found:
            bars.append(label)
            columns.append(_mean_of_parts(found))
    if bars:
        yield Bars(
            name="participation",
            title="Who took part",
            about="Outcomes of the selected clients in the simulated system (--system); mean over rounds and seeds.",
            x_title="clients per round",
            bars=bars,
            parts=_parts(columns),
        )


def _fared(run: RunRecord) -> dict[str, float]:
    """Return the mean number of selected clients of a round by outcome; empty without a simulated system."""
    lines = [line for line in run.rounds if mapping_in(line, "system")]
    counts = dict.fromkeys(("all epochs", "fewer epochs", *SIMULATED, "other failures"), 0)
    for line in lines:
        system, cohort = line["system"], list_in(line, "cohort")
        fewer = len(mapping_in(system, "partial"))
        counts["all epochs"] += len(list_in(system, "took_part")) - fewer
        counts["fewer epochs"] += fewer
        failures = [failure for failure in list_in(line, "failures") if isinstance(failure, dict)]
        kinds = {f["client"]: f.get("kind") for f in failures if isinstance(f.get("client"), int)}
        for client in kinds.keys() & {client for client in cohort if isinstance(client, int)}:
            kind = kinds[client]
            counts[kind if kind in SIMULATED else "other failures"] += 1
    return {name: count / len(lines) for name, count in counts.items()} if lines else {}


def bytes_sent(group: Group) -> Chart | Omitted:
    """Return the MB per round, each way, by who sent them."""
    bars, columns = [], []
    for label, runs in group.rows.items():
        for direction in ("down", "up"):
            found = [_bytes_per_round(run, direction) for run in runs if run.rounds]
            if found:
                bars.append(f"{label} {direction}")
                columns.append(_mean_of_parts(found))
    if not bars:
        return Omitted("Communication", "no round is recorded yet")
    return Bars(
        name="bytes",
        title="Communication per round",
        about="Bytes to all clients of a round (down) and from them (up), by sender; mean over rounds and seeds.",
        x_title="MB per round",
        bars=bars,
        parts=_parts(columns),
    )


def seconds(group: Group) -> Chart | Omitted:
    """Return the seconds per round by stage."""
    bars, columns = [], []
    for label, runs in group.rows.items():
        found = []
        for run in runs:
            lines = [line for line in run.rounds if mapping_in(line, "time")]
            lines = lines[1:] or lines
            means = {
                part: statistics.fmean(number(mapping_in(line, "time").get(part)) or 0.0 for line in lines)
                for part in TIMES
                if lines
            }
            if means:
                found.append(means)
        if found:
            bars.append(label)
            columns.append(_mean_of_parts(found))
    if not bars:
        return Omitted("Time", "no round is recorded yet")
    return Bars(
        name="seconds",
        title="Time per round",
        about="Seconds on the machine that ran it, whatever else it did meanwhile; mean over seeds and rounds, "
        "without the first, which also starts processes.",
        x_title="seconds per round",
        bars=bars,
        parts=_parts(columns),
    )


def _bytes_per_round(run: RunRecord, direction: str) -> dict[str, float]:
    """Return MB per round by sender, over the rounds that are recorded."""
    totals: dict[str, float] = {}
    for line in run.rounds:
        senders = mapping_in(mapping_in(line, "bytes"), "by_plugin") or {"in all": line["bytes"]}
        for sender in senders:
            totals[sender] = totals.get(sender, 0.0) + (number(mapping_in(senders, sender).get(direction)) or 0.0)
    return {sender: total / len(run.rounds) / MB for sender, total in totals.items()}


def _mean_of_parts(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for parts in found for name in parts)
    return {name: statistics.fmean(parts.get(name, 0.0) for parts in found) for name in names}


def _parts(columns: Sequence[Mapping[str, float]]) -> list[Part]:
    names = dict.fromkeys(name for column in columns for name in column)
    parts = [Part(plain(name).replace("_", " "), [column.get(name, 0.0) for column in columns]) for name in names]
    return [part for part in parts if any(part.values)]
