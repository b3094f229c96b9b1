"""What results and rounds are made of: accuracy by client and by class, confusions, outcomes, bytes and seconds.

Imports no torch. Runs of one row are put together, which differ in the seed alone. Every value comes from a file, which
may be damaged or untrusted: a value that is no finite number counts as not recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fedcore.tools import PROTOCOLS, protocols, rounds
from fedcore_report.charts import (
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
from fedcore_report.lines import MB, measure_of, named
from fedcore_study.tools import (
    ACCURACY,
    Group,
    Measure,
    RunRecord,
    list_in,
    mapping_in,
    number,
    seconds_per_round,
    timed_rounds,
)

TIMES = ("selection", "broadcast", "local_training", "collection", "aggregation", "evaluation")
"""What a round's seconds are made of; workers' idle time and the like are parts of these."""

SMALL = 0.005
"""A part below this fraction of the longest bar, in every bar, would be too narrow to be seen."""

Counts: TypeAlias = "list[list[int]]"


def by_client(group: Group, colors: Mapping[str, int], main: str) -> Chart | Omitted:
    """Return the distribution of the figure over the clients, for the first protocol that recorded it.

    :param main: the protocol that comes first.
    """
    measure = measure_of(group).of_client
    name = named(measure)
    title = f"{name} by client"
    for protocol in dict.fromkeys((main, *protocols.HELD_OUT, "personal_global")):
        boxes: list[Box] = []
        after = set[int]()
        for label, runs in group.rows.items():
            rounds, measured = _standing(runs, protocol)
            if drawn := _boxes(label, colors[label], measured, measure):
                boxes += drawn
                after |= rounds
        if boxes:
            return Boxes(
                name="clients",
                title=f"{title}, {protocol}",
                about=f"{name} of {PROTOCOLS[protocol].measures}, {_after(after)}. The box spans the middle half of "
                "the clients, of all seeds together; the line in it is the median.",
                x_title=f"{measure.name}{measure.unit}",
                boxes=boxes,
                digits=1 if measure.unit else 3,
            )
    return Omitted(title, "no run recorded it; --client-test-fraction 0.2 holds samples out on each client")


def _boxes(label: str, color: int, measured: Sequence[tuple[RunRecord, Metrics]], measure: Measure) -> list[Box]:
    """Return a box of all clients of a row, or one of the quantiles of each run with more than 1,000 clients.

    :param measured: runs, each with one protocol's figures.
    """
    scale = measure.scale
    if measure.by_client == ACCURACY.name and not all(measure.of_clients(figures) for _, figures in measured):
        return [
            Box(f"{label}, seed {run.config.seed}", color, [], [], [scale * quantile for quantile in quantiles])
            for run, figures in measured
            if len(quantiles := [q for q in map(number, list_in(figures, "quantiles")) if q is not None]) == 7
        ]
    values = [
        (scale * value, f"{plain(run.client(client))}, seed {run.config.seed}")
        for run, figures in measured
        for client, own in measure.of_clients(figures).items()
        if (value := number(own)) is not None
    ]
    return [Box(label, color, [value for value, _ in values], [name for _, name in values])] if values else []


def by_class(group: Group, class_names: Sequence[str] | None) -> Chart | Omitted:
    """Return the global model's accuracy by class."""

    def read(figures: Metrics) -> Mapping[str, Any]:
        values = list_in(figures, "per_class")
        return dict(zip(_names(class_names, len(values)), values, strict=True))

    chart = _figure_by(group, ACCURACY, read, "classes", "class", "the server's test set")
    if chart is not None:
        return chart
    runs = [run for runs in group.rows.values() for run in runs]
    if any(run.signs for run in runs):
        return Omitted("Accuracy by class", "the runs' task has no classes")
    reasons = {plain(m["global_reason"]) for run in runs for m in _metrics(run) if "global_reason" in m}
    return Omitted("Accuracy by class", "; ".join(sorted(reasons)) or "no run has been evaluated yet")


def by_domain(group: Group) -> Iterator[Chart]:
    """Yield the global model's figure by domain, for a data set with domains."""
    measure = measure_of(group).of_client
    chart = _figure_by(group, measure, measure.of_domains, "domains", "domain", "the test samples of each domain")
    if chart is not None:
        yield chart


def _figure_by(
    group: Group,
    measure: Measure,
    read: Callable[[Metrics], Mapping[str, Any]],
    name: str,
    part: str,
    samples: str,
) -> Heatmap | None:
    """Return the global model's figure by row and part, mean over seeds; None if no run recorded it.

    :param read: returns the figures by part from the figures of a run's global model.
    """
    means: dict[str, dict[str, float | None]] = {}
    after = set[int]()
    for label, runs in group.rows.items():
        rounds, measured = _standing(runs, "global")
        values: dict[str, list[float]] = {}
        for _, figures in measured:
            for place, accuracy in read(figures).items():
                values.setdefault(place, []).extend([] if (value := number(accuracy)) is None else [value])
        if values:
            means[label] = {
                place: measure.scale * statistics.fmean(each) if each else None for place, each in values.items()
            }
            after |= rounds
    if not means:
        return None
    columns = list(dict.fromkeys(place for row in means.values() for place in row))
    return Heatmap(
        name=name,
        title=f"{named(measure)} by {part}",
        about=f"{named(measure)}{measure.unit} of the global model on {samples}, {_after(after)}; mean over seeds.",
        x_title=part,
        y_title="",
        columns=[plain(place) for place in columns],
        rows=list(means),
        grid=[[row.get(place) for place in columns] for row in means.values()],
        unit=measure.unit.strip(),
    )


def confusions(
    group: Group, class_names: Sequence[str] | None, main: str
) -> tuple[list[Chart | Omitted], dict[str, list[Chart]]]:
    """Return the confusion matrices of a group's finished runs, a row's being the sum over its seeds.

    :param main: the protocol that comes first.
    :returns: The matrices of the main protocol, or of the first that has some, and the others by protocol.
    """
    drawn = {protocol: charts for protocol in PROTOCOLS if (charts := list(_confusions(group, class_names, protocol)))}
    if not drawn:
        return [Omitted("Confusion matrix", "a finished run records it, up to 100 classes")], {}
    return [*drawn.pop(main if main in drawn else next(iter(drawn)))], drawn


def _confusions(group: Group, class_names: Sequence[str] | None, protocol: str) -> Iterator[Chart]:
    key, clients = protocols.confusion_key(protocol), "clients and " if PROTOCOLS[protocol].on_clients else ""
    for label, runs in group.rows.items():
        matrices = [run.summary[key] for run in runs if run.summary is not None and run.summary.get(key)]
        if not matrices:
            continue
        names = _names(class_names, len(matrices[0]))
        yield Heatmap(
            name=f"confusion-{protocol}-{label}",
            title=f"Confusion matrix, {protocol}: {plain(label)}",
            about="Of the samples of a class (row) with a prediction, the percentage taken for each class (column) "
            f"by {PROTOCOLS[protocol].measures}, at the end; all {clients}seeds together. Shades grow with the "
            "square root.",
            x_title="predicted",
            y_title="class",
            columns=names,
            rows=names,
            grid=_in_percent(matrices),
            unit="%",
            root=True,
        )


def _in_percent(matrices: Sequence[Counts]) -> Grid:
    """Return the sum of matrices, each row in percent of its samples; None in a row without samples."""
    total = [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
    return [[100 * count / sum(row) if sum(row) else None for count in row] for row in total]


def participation(group: Group) -> Iterator[Chart]:
    """Yield the outcomes of the selected clients, if a simulated system recorded them."""
    about = "Outcomes of the selected clients in the simulated system (--system); mean over rounds and seeds."
    outcomes = {label: [_outcomes(run) for run in runs] for label, runs in group.rows.items()}
    chart = _bars("participation", "Who took part", about, "clients per round", outcomes)
    if chart is not None:
        yield chart


def _outcomes(run: RunRecord) -> dict[str, float]:
    """Return the mean number of selected clients of a round by outcome; empty without a simulated system."""
    lines = [line for line in run.rounds if "system" in line]
    counts = dict.fromkeys(("all epochs", "fewer epochs", *rounds.SIMULATED, "other failures"), 0)
    for line in lines:
        fewer = len(line["system"]["partial"])
        counts["all epochs"] += len(line["system"]["took_part"]) - fewer
        counts["fewer epochs"] += fewer
        losses = rounds.lost(line)
        for kind in rounds.SIMULATED:
            counts[kind] += losses[kind]
        counts["other failures"] += rounds.errors(losses)
    return {name: count / len(lines) for name, count in counts.items()} if lines else {}


def bytes_sent(group: Group) -> Chart | Omitted:
    """Return the MB per round in each direction, by sender."""
    about = "Bytes to all clients of a round (down) and from them (up), by sender; mean over rounds and seeds."
    sent = {
        f"{label} {direction}": [_bytes_per_round(run, direction) for run in runs if run.rounds]
        for label, runs in group.rows.items()
        for direction in ("down", "up")
    }
    title = "Communication per round"
    return _bars("bytes", title, about, "MB per round", sent) or Omitted(title, "no round is recorded yet")


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
        "Seconds of a round with its evaluation on the machine that ran it, whatever else it did meanwhile; mean over "
        "seeds and rounds, without the first, which also starts processes. The whole bar is s/round of the table."
    )
    by_stage = {label: [_seconds_per_round(run) for run in runs] for label, runs in group.rows.items()}
    title = "Time per round"
    return _bars("seconds", title, about, "seconds per round", by_stage) or Omitted(title, "no round is recorded yet")


def _seconds_per_round(run: RunRecord) -> dict[str, float]:
    """Return the mean seconds of each stage; what no stage accounts for is ``other``."""
    lines = [mapping_in(line, "time") for line in timed_rounds(run)]
    means = {part: statistics.fmean(number(line.get(part)) or 0.0 for line in lines) for part in TIMES if lines}
    whole = seconds_per_round(run)
    return means if whole is None else {**means, "other": max(0.0, whole - sum(means.values()))}


def _bars(
    name: str, title: str, about: str, x_title: str, rows: Mapping[str, Sequence[Mapping[str, float]]]
) -> Chart | None:
    """Return stacked bars, each the mean of the runs that recorded something; None if there is nothing to see.

    :param rows: the parts of each run's bar, by the bar's label.
    """
    columns = {}
    for label, runs in rows.items():
        recorded = [parts for parts in runs if parts]
        if recorded:
            names = dict.fromkeys(name for parts in recorded for name in parts)
            columns[label] = {name: statistics.fmean(parts.get(name, 0.0) for parts in recorded) for name in names}
    parts = _parts(list(columns.values()))
    if not parts:
        return None
    totals = [sum(column.values()) for column in columns.values()]
    return Bars(name=name, title=title, about=about, x_title=x_title, bars=list(columns), parts=parts, totals=totals)


def _parts(columns: Sequence[Mapping[str, float]]) -> list[Part]:
    """Return the parts of bars from each bar's values by name.

    Parts that are too narrow to be seen in every bar are joined to one part. If that is too narrow too, it is left out.
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


def _standing(runs: Sequence[RunRecord], protocol: str) -> tuple[set[int], list[tuple[RunRecord, Metrics]]]:
    """Return a protocol's figures of a row's runs, and the numbers of rounds after which they were taken.

    Finished runs have the figures of their end. If no run is finished, all runs that have begun have the figures of the
    last evaluated round that they have in common.
    """
    if any(run.summary for run in runs):
        measured = [(run, figures) for run in runs if (figures := run.figures(protocol, None))]
        return {run.summary["rounds"] for run, _ in measured if run.summary}, measured
    evaluated = [(run, {point.rounds for point in run.curve(protocol)}) for run in runs]
    begun = [(run, rounds) for run, rounds in evaluated if rounds]
    shared = set.intersection(*(rounds for _, rounds in begun)) if begun else set()
    last = max(shared, default=0)
    return {last}, [(run, run.figures(protocol, last)) for run, _ in begun] if shared else []


def _metrics(run: RunRecord) -> Iterator[Metrics]:
    yield from (mapping_in(line, "metrics") for line in run.rounds)
    if run.summary:
        yield run.summary["metrics"]


def _names(class_names: Sequence[str] | None, count: int) -> list[str]:
    """Return the classes' names if there are as many, else numbers."""
    return list(class_names) if class_names and len(class_names) == count else [str(c) for c in range(count)]


def _after(rounds: set[int]) -> str:
    least, most = min(rounds), max(rounds)
    return f"after {f'{least} to {most}' if least < most else most} rounds"
