"""Runs into what a report shows of their records: tables and charts. Imports no torch.

Nothing is averaged but runs of one group and row, which differ in the seed alone. Every value comes from a file, which
may be damaged or untrusted: what is no finite number counts as not recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fedcore.base.protocols import EVALUATED, PROTOCOLS, VALIDATION
from fedcore_study.comparisons.groups import Group
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.reports.charts import Box, Boxes, Chart, Curves, Heatmap, Line, Omitted, number, plain
from fedcore_study.reports.confusion import confusions
from fedcore_study.reports.costs import against_costs
from fedcore_study.reports.lines import figure_of, how, lines_of, over_rounds, scaled
from fedcore_study.reports.reading import mapping_in
from fedcore_study.reports.shares import bytes_sent, participation, seconds

Metrics: TypeAlias = "Mapping[str, Any]"


def records_of(group: Group, colors: Mapping[str, int], class_names: Sequence[str] | None) -> Iterator[Chart | Omitted]:
    """Yield every chart that the records of a group give, and what cannot be drawn with the reason.

    :param colors: number of each row's colour. ``class_names`` are there if the data set is.
    """
    yield from _learning(group, colors)
    yield from against_costs(group, colors)
    yield _per_client(group, colors)
    yield _per_class(group, class_names)
    yield from confusions(group, class_names)
    yield from _losses(group, colors)
    yield from participation(group)
    yield bytes_sent(group)
    yield seconds(group)


def state(run: RunRecord) -> str:
    """Return how far a run is, in words."""
    if run.finished:
        return "finished"
    return f"{len(run.rounds)} of {run.config.rounds} rounds" if run.rounds else "no round yet"


def final_accuracy(run: RunRecord) -> tuple[str, float] | None:
    """Return the last accuracy of a run, finished or not, with its protocol: the first of ``EVALUATED`` it has."""
    for protocol in EVALUATED:
        end = run.final(protocol) or next(iter(reversed(run.curve(protocol))), None)
        if end is not None:
            return protocol, end.accuracy
    return None


def _learning(group: Group, colors: Mapping[str, int]) -> Iterator[Chart | Omitted]:
    drawn = False
    for protocol in EVALUATED:
        meaning = PROTOCOLS[protocol].measures

        def read(line: Mapping[str, Any], protocol: str = protocol) -> float | None:
            return scaled(figure_of(line, protocol, "accuracy"), 100)

        lines = lines_of(group, colors, lambda run, read=read: over_rounds(run, read))  # type: ignore[misc]
        if lines:
            drawn = True
            yield Curves(
                name=f"learning-{protocol}",
                title=f"Accuracy over rounds, {protocol}",
                about=f"Accuracy of {meaning}. {how(lines)}",
                x_title="round",
                y_title="accuracy %",
                lines=lines,
            )
    if not drawn:
        yield Omitted("Accuracy over rounds", "no run has been evaluated yet")


def _per_client(group: Group, colors: Mapping[str, int]) -> Chart | Omitted:
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
                y_title="accuracy %",
                boxes=boxes,
            )
    return Omitted(title, "no run recorded it; --client-test-fraction 0.2 holds samples out on each client")


def _per_class(group: Group, class_names: Sequence[str] | None) -> Chart | Omitted:
    title = "Accuracy by class"
    rows, grid, after = [], [], set()
    for label, runs in group.rows.items():
        rounds, reached = _standing(runs, "global")
        found = [metrics["global"].get("per_class") for _, metrics in reached]
        lists = [values for values in found if isinstance(values, list) and values]
        if lists and len({len(values) for values in lists}) == 1:
            rows.append(label)
            columns = [[v for v in map(number, column) if v is not None] for column in zip(*lists, strict=True)]
            grid.append([100 * statistics.fmean(column) if column else None for column in columns])
            after.add(rounds)
    width = max(map(len, grid), default=0)
    if not width:
        reasons = {plain(m.get("global_reason")) for run in _runs(group) for m in _metrics(run) if "global_reason" in m}
        return Omitted(title, "; ".join(sorted(reasons)) or "no run has been evaluated yet")
    names = list(class_names or [])
    return Heatmap(
        name="classes",
        title=title,
        about=f"Of the global model on the server's test set, {_after(after)}; mean over seeds.",
        x_title="class",
        y_title="",
        columns=names if len(names) == width else [str(c) for c in range(width)],
        rows=rows,
        layers={"": [row + [None] * (width - len(row)) for row in grid]},
        unit="%",
    )


def _losses(group: Group, colors: Mapping[str, int]) -> Iterator[Chart | Omitted]:
    terms = dict.fromkeys(term for run in _runs(group) for line in run.rounds for term in mapping_in(line, "losses"))
    drawn = 0
    for term in sorted(terms, key=lambda term: (term != "task", term)):

        def read(line: Mapping[str, Any], term: str = term) -> float | None:
            return number(mapping_in(line, "losses").get(term))

        lines = lines_of(group, colors, lambda run, read=read: over_rounds(run, read))  # type: ignore[misc]
        if lines:
            drawn += 1
            plugin, dot, name = term.rpartition(".")
            yield Curves(
                name=f"loss-{term}",
                title=f"Loss term {plain(name)} of {plain(plugin)}" if dot else f"Loss of the {plain(term)}",
                about=f"Mean over the clients' steps of a round, as recorded. {how(lines)}",
                x_title="round",
                y_title="loss",
                lines=lines,
                log=_far_apart(lines),
            )
    if not drawn:
        yield Omitted("Loss terms", "no round is recorded yet")


def _far_apart(lines: Sequence[Line]) -> bool:
    """Whether values are all positive and differ so much that a linear axis would show the largest alone."""
    values = [y for line in lines for y in (*line.y, *(y for _, ys in line.tails for y in ys))]
    return bool(values) and min(values) > 0 and max(values) > 1000 * statistics.median(values)


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


def _runs(group: Group) -> Iterator[RunRecord]:
    return (run for runs in group.rows.values() for run in runs)


def _after(rounds: set[int]) -> str:
    return f"after {' or '.join(map(str, sorted(rounds)))} rounds"
