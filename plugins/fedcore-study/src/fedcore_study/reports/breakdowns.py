"""What results and rounds are made of: accuracy by client and by class, confusions, outcomes, bytes and seconds.

Imports no torch. Runs of one row are put together, which differ in the seed alone. Every value comes from a file, which
may be damaged or untrusted: what is no finite number counts as not recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fedcore.base.protocols import PROTOCOLS, VALIDATION, confusion_key
from fedcore.runs.records import SIMULATED
from fedcore_study.comparisons.groups import Group
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.lenient import list_in, mapping_in, number
from fedcore_study.reports.charts import (
    Bars,
    Box,
    Boxes,
    Chart,
    Grid,
    Heatmap,
    Omitted,
    Part,
    plain,
)
from fedcore_study.reports.lines import MB

TIMES = ("selection", "broadcast", "local_training", "collection", "aggregation", "evaluation")
"""What a round's seconds are made of; workers' idle time and the like are parts of these."""

SMALL = 0.005
"""A part below this fraction of the longest bar, in every bar, would be too narrow to be seen."""

Counts: TypeAlias = "list[list[int]]"


def by_client(group: Group, colors: Mapping[str, int]) -> Chart | Omitted:
    """Return the distribution of the accuracy over the clients, of the first protocol that has it."""
    title = "Accuracy by client"
    for protocol in (*VALIDATION, "personal_global"):
        boxes: list[Box] = []
        after = set()
        for label, runs in group.rows.items():
            rounds, reached = _standing(runs, protocol)
            each = [(run, metrics[protocol].get("per_client")) for run, metrics in reached]
            if each and all(isinstance(found, dict) for _, found in each):
                values = [
                    (100 * value, f"client {plain(client)}, seed {run.config.seed}")
                    for run, found in each
                    for client, accuracy in found.items()
                    if (value := number(accuracy)) is not None
                ]
                if values:
                    boxes.append(Box(label, colors[label], [v for v, _ in values], [n for _, n in values]))
                    after.add(rounds)
                continue
            for run, metrics in reached:  # too many clients to have been recorded one by one
                quantiles = [number(value) for value in metrics[protocol].get("quantiles") or []]
                if len(quantiles) == 7 and None not in quantiles:
                    name = f"{label}, seed {run.config.seed}"
                    boxes.append(Box(name, colors[label], [], [], [100 * q for q in quantiles if q is not None]))
                    after.add(rounds)
        if boxes:
            return Boxes(
                name="clients",
                title=f"{title}, {protocol}",
                about=f"Accuracy of {PROTOCOLS[protocol].measures}, {_after(after)}. The box spans the middle half of "
                "the clients, of all seeds together; the line in it is the median.",
                x_title="accuracy %",
                boxes=boxes,
            )
    return Omitted(title, "no run recorded it; --client-test-fraction 0.2 holds samples out on each client")


def by_class(group: Group, class_names: Sequence[str] | None) -> Chart | Omitted:
    """Return the global model's accuracy by class."""
    title = "Accuracy by class"
    rows, grid, after = [], [], set()
    for label, runs in group.rows.items():
        rounds, reached = _standing(runs, "global")
        found = [metrics["global"].get("per_class") for _, metrics in reached]
        lists = [values for values in found if isinstance(values, list) and values]
        if lists and len({len(values) for values in lists}) == 1:
            columns = [[v for v in map(number, column) if v is not None] for column in zip(*lists, strict=True)]
            rows.append(label)
            grid.append([100 * statistics.fmean(column) if column else None for column in columns])
            after.add(rounds)
    width = max(map(len, grid), default=0)
    if not width:
        runs = [run for found in group.rows.values() for run in found]
        reasons = {plain(m["global_reason"]) for run in runs for m in _metrics(run) if "global_reason" in m}
        return Omitted(title, "; ".join(sorted(reasons)) or "no run has been evaluated yet")
    return Heatmap(
        name="classes",
        title=title,
        about=f"Accuracy of the global model on the server's test set in percent, {_after(after)}; mean over seeds.",
        x_title="class",
        y_title="",
        columns=_names(class_names, width),
        rows=rows,
        grid=[row + [None] * (width - len(row)) for row in grid],
        unit="%",
    )


def by_domain(group: Group) -> Iterator[Chart]:
    """Yield the global model's accuracy by domain, for a data set with domains."""
    found: dict[str, dict[str, float]] = {}
    after = set()
    for label, runs in group.rows.items():
        rounds, reached = _standing(runs, "global")
        values: dict[str, list[float]] = {}
        for _, metrics in reached:
            for domain, accuracy in mapping_in(metrics["global"], "domains").items():
                if (value := number(accuracy)) is not None:
                    values.setdefault(domain, []).append(value)
        if values:
            found[label] = {domain: 100 * statistics.fmean(each) for domain, each in values.items()}
            after.add(rounds)
    names = list(dict.fromkeys(domain for row in found.values() for domain in row))
    if names:
        yield Heatmap(
            name="domains",
            title="Accuracy by domain",
            about="Accuracy of the global model on the test samples of each domain in percent, "
            f"{_after(after)}; mean over seeds.",
            x_title="domain",
            y_title="",
            columns=[plain(name) for name in names],
            rows=list(found),
            grid=[[row.get(name) for name in names] for row in found.values()],
            unit="%",
        )


def confusions(group: Group, class_names: Sequence[str] | None) -> Iterator[Chart | Omitted]:
    """Yield the confusion matrices of a group's finished runs, by protocol and row: the counts of its seeds added."""
    drawn = False
    for protocol in PROTOCOLS:
        clients = "clients and " if PROTOCOLS[protocol].on_clients else ""
        for label, runs in group.rows.items():
            found = [matrix for run in runs if (matrix := _counts_in(run.summary, confusion_key(protocol))) is not None]
            if not found or len({len(matrix) for matrix in found}) > 1:
                continue
            drawn = True
            names = _names(class_names, len(found[0]))
            yield Heatmap(
                name=f"confusion-{protocol}-{label}",
                title=f"Confusion matrix, {protocol}: {plain(label)}",
                about=f"Of the samples of a class (row), the percentage taken for each class (column) by "
                f"{PROTOCOLS[protocol].measures}, at the end; all {clients}seeds together. Shades grow with the "
                "square root.",
                x_title="predicted",
                y_title="class",
                columns=names,
                rows=names,
                grid=_in_percent(found),
                unit="%",
                root=True,
            )
    if not drawn:
        yield Omitted("Confusion matrix", "a finished run records it, up to 100 classes")


def _counts_in(summary: Any, key: str) -> Counts | None:
    """Return a matrix of a summary, which may be damaged; None where there is no square one of counts."""
    matrix = summary.get(key) if isinstance(summary, dict) else None
    if not isinstance(matrix, list) or not matrix:
        return None
    for row in matrix:
        if not isinstance(row, list) or len(row) != len(matrix):
            return None
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in row):
            return None
    return matrix


def _in_percent(found: Sequence[Counts]) -> Grid:
    """Return the sum of matrices, each row in percent of its samples; None in a row without any."""
    total = [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]
    return [[100 * count / sum(row) if sum(row) else None for count in row] for row in total]


def participation(group: Group) -> Iterator[Chart]:
    """Yield the outcomes of the selected clients, where a simulated system recorded them."""
    about = "Outcomes of the selected clients in the simulated system (--system); mean over rounds and seeds."
    found = {label: [_fared(run) for run in runs] for label, runs in group.rows.items()}
    chart = _bars("participation", "Who took part", about, "clients per round", found)
    if chart is not None:
        yield chart


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
    about = "Bytes to all clients of a round (down) and from them (up), by sender; mean over rounds and seeds."
    found = {
        f"{label} {direction}": [_bytes_per_round(run, direction) for run in runs if run.rounds]
        for label, runs in group.rows.items()
        for direction in ("down", "up")
    }
    title = "Communication per round"
    return _bars("bytes", title, about, "MB per round", found) or Omitted(title, "no round is recorded yet")


def _bytes_per_round(run: RunRecord, direction: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in run.rounds:
        senders = mapping_in(mapping_in(line, "bytes"), "by_plugin") or {"in all": line["bytes"]}
        for sender in senders:
            totals[sender] = totals.get(sender, 0.0) + (number(mapping_in(senders, sender).get(direction)) or 0.0)
    return {sender: total / len(run.rounds) / MB for sender, total in totals.items()}


def seconds(group: Group) -> Chart | Omitted:
    """Return the seconds per round by stage."""
    about = (
        "Seconds on the machine that ran it, whatever else it did meanwhile; mean over seeds and rounds, without the "
        "first, which also starts processes."
    )
    found = {label: [_seconds_per_round(run) for run in runs] for label, runs in group.rows.items()}
    title = "Time per round"
    return _bars("seconds", title, about, "seconds per round", found) or Omitted(title, "no round is recorded yet")


def _seconds_per_round(run: RunRecord) -> dict[str, float]:
    lines = [times for line in run.rounds if (times := mapping_in(line, "time"))]
    lines = lines[1:] or lines
    return {part: statistics.fmean(number(line.get(part)) or 0.0 for line in lines) for part in TIMES if lines}


def _bars(
    name: str, title: str, about: str, x_title: str, found: Mapping[str, Sequence[Mapping[str, float]]]
) -> Chart | None:
    """Return stacked bars, each the mean of the runs that recorded something; None where nothing is to be seen."""
    columns = {}
    for label, runs in found.items():
        recorded = [parts for parts in runs if parts]
        if recorded:
            names = dict.fromkeys(name for parts in recorded for name in parts)
            columns[label] = {name: statistics.fmean(parts.get(name, 0.0) for parts in recorded) for name in names}
    parts = _parts(list(columns.values()))
    if not parts:
        return None
    return Bars(name=name, title=title, about=about, x_title=x_title, bars=list(columns), parts=parts)


def _parts(columns: Sequence[Mapping[str, float]]) -> list[Part]:
    """Return the parts of bars from each bar's values by name.

    Parts too narrow to be seen in any bar are joined to one, which is left out if it cannot be seen either.
    """
    least = SMALL * max((sum(column.values()) for column in columns), default=0.0)
    parts, small = [], [0.0] * len(columns)
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, 0.0) for column in columns]
        if max(values) > least:
            parts.append(Part(plain(name).replace("_", " "), values))
        else:
            small = [total + value for total, value in zip(small, values, strict=True)]
    return [*parts, Part("other", small)] if max(small, default=0.0) > least else parts


Metrics: TypeAlias = "Mapping[str, Any]"


def _standing(runs: Sequence[RunRecord], protocol: str) -> tuple[int, list[tuple[RunRecord, Metrics]]]:
    """Return figures of runs that can be put together, and after how many rounds: at the end of the finished ones.

    Where none is finished, after the last round that all of them reached.
    """
    finished = [(run, run.summary) for run in runs if run.summary is not None]
    if finished:
        ends = [(run, summary["metrics"]) for run, summary in finished if _has(summary["metrics"], protocol)]
        return max(summary["rounds"] for _, summary in finished), ends
    by_round = [
        {line["round"] + 1: line["metrics"] for line in run.rounds if _has(mapping_in(line, "metrics"), protocol)}
        for run in runs
    ]
    begun = [(run, found) for run, found in zip(runs, by_round, strict=True) if found]
    shared = set.intersection(*(set(found) for _, found in begun)) if begun else set()
    if not shared:
        return 0, []
    last = max(shared)
    return last, [(run, found[last]) for run, found in begun]


def _has(metrics: Metrics, protocol: str) -> bool:
    return isinstance(metrics.get(protocol), dict)


def _metrics(run: RunRecord) -> Iterator[Metrics]:
    yield from (mapping_in(line, "metrics") for line in run.rounds)
    if run.summary:
        yield run.summary["metrics"]


def _names(class_names: Sequence[str] | None, count: int) -> list[str]:
    """Return the classes' names where they fit, else their numbers."""
    return list(class_names) if class_names and len(class_names) == count else [str(c) for c in range(count)]


def _after(rounds: set[int]) -> str:
    return f"after {' or '.join(map(str, sorted(rounds)))} rounds"
