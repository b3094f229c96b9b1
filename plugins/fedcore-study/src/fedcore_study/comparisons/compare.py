"""Compares runs by seed, under one evaluation protocol or several.

Figures are only averaged over seeds. Runs that differ in a setting other than the seed and the rows' options are in
different blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import PARTITION_OPTIONS, PROTOCOLS, key, short_name
from fedcore.tools import protocols as evaluation
from fedcore_study.comparisons.blocks import block_of, ranks_of
from fedcore_study.comparisons.comparison import CLIENTS, DIFFERENCE, SEEDS, Comparison, P
from fedcore_study.comparisons.costs import COSTS, EACH
from fedcore_study.comparisons.groups import Group, distinct, group_runs, option, relabelled
from fedcore_study.comparisons.measures import ACCURACY, Measure
from fedcore_study.comparisons.records import RunRecord, Warn
from fedcore_study.comparisons.tuned import tuned_runs
from fedcore_study.comparisons.usable import usable
from fedcore_study.lenient import number


def compare_runs(runs: Sequence[RunRecord], *, protocol: str = "global", **question: Any) -> Comparison:
    """Compare runs by seed under one protocol, as :func:`compare_protocols`."""
    return compare_protocols(runs, [protocol], **question)[0]


def compare_protocols(
    runs: Sequence[RunRecord],
    protocols: Sequence[str],
    *,
    metric: str = "accuracy",
    by: Sequence[str] = ("plugin",),
    tuned: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    baseline: str | None = None,
    target: float | None = None,
    round: int | None = None,
    confidence: float = 0.95,
    by_client: bool = False,
    reported: Sequence[str] = (),
    columns: Sequence[str] = (),
    warn: Warn = lambda message: None,
) -> list[Comparison]:
    """Compare runs by seed under each protocol. Blocks with the same settings have the same runs.

    :param metric: the figure to compare, by its name in ``summary.json``; see :class:`Measure`. ``accuracy`` is the
        first figure of their task for runs without one.
    :param by: what makes a row: ``plugin`` and options of a run.
    :param tuned: options of which each row has its own values; see :func:`tuned_runs`.
    :param labels: names for rows, by the names that they would have.
    :param baseline: the label of the row that differences are to, by default a block's only row of fedavg.
    :param target: an accuracy in (0, 1], or a value of a task's first figure; the rounds and bytes until it is first
        reached are counted.
    :param round: compare after this number of rounds, also unfinished runs; by default finished runs at their end.
    :param by_client: show how the figure is spread over the clients, for a protocol that they measure; and the figure
        of each client, if they have names.
    :param reported: figures of plugins' reports to show, such as ``attack.success``.
    :param columns: what tables show: ``seeds``, ``difference``, ``p``, a figure of the protocol, ``clients`` for that
        of each client, a cost of ``COSTS``, ``costs`` for all of these, ``PLUGIN.NAME`` of a report; by default all
        but clients and further costs.
    :raises ConfigError: there is nothing to compare, a name does not exist, or runs contradict one another: two have
        the same settings and seed, or the same partition but other clients.
    """
    fields = [option(name) for name in by]
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise UnknownNameError("protocol", protocol, PROTOCOLS)
    measure, signs = measure_of(runs, metric)
    if target is not None and runs and all(run.figure != measure.name for run in runs):
        raise ConfigError(f"--target is of {runs[0].figure}; leave out --metric")
    if target is not None and measure == ACCURACY and not 0 < target <= 1:
        raise ConfigError(f"--target is {target}; accuracies are fractions, for example --target 0.8")
    words = [short_name(word) if ":" in word else word for name in columns for word in name.split(",")]
    words = list(dict.fromkeys(word for name in words for word in (EACH if name == "costs" else (name,))))
    for protocol in protocols if by_client or CLIENTS in words else ():
        if not PROTOCOLS[protocol].on_clients:
            names = ", ".join(f"--protocol {name}" for name in evaluation.ON_CLIENTS)
            asked_by = "--clients" if by_client else "--columns clients"
            raise ConfigError(f"{asked_by}: protocol {protocol!r} has no figures by client; these have: {names}")
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence is {confidence}; write a fraction such as 0.95")
    warned: set[str] = set()

    def warn_once(message: str) -> None:
        if message not in warned:
            warned.add(message)
            warn(message)

    chosen, own = tuned_runs(runs, fields, tuned, warn_once)
    kept = {
        protocol: distinct(usable(chosen, protocol, round, warn_once, measure.name), fields, warn_once)
        for protocol in dict.fromkeys(protocols)
    }
    every = {run.path: run for of_protocol in kept.values() for run in of_protocol}
    common, groups = group_runs(list(every.values()), fields, own)
    groups = relabelled(groups, labels or {})
    baseline = (labels or {}).get(baseline or "", baseline)
    if baseline is not None and not any(baseline in group.rows for group in groups):
        raise UnknownNameError("baseline", baseline, {label for group in groups for label in group.rows})
    if round is not None and _differ_in_rounds_alone(groups):
        warn(
            f"runs with other --rounds stand in tables of their own, also after round {round}: a schedule or a method "
            "can depend on --rounds. To see them in one table: --by plugin --by rounds"
        )
    if apart := _own_settings(groups):
        warn(
            f"each method stands in a table of its own, as their runs differ in {', '.join(apart)}. "
            f"To see them in one, each at its own value: --tuned {','.join(apart)}"
        )
    reported = list(dict.fromkeys([*reported, *(word for word in words if "." in word)]))
    check_reported(list(every.values()), reported, round)
    _check_columns(words, measure.name, kept, round)
    rows_by = ["plugin" if name == "plugins" else name for name in fields]
    comparisons = []
    for protocol, measured in kept.items():
        asked = Comparison(
            protocol,
            rows_by,
            round,
            target,
            confidence,
            common,
            by_client=by_client,
            reported=reported,
            columns=words,
            measure=measure,
            tuned=own,
            signs=signs,
        )
        own_groups = _only(groups, measured)
        blocks = [block_of(group, asked, baseline) for group in own_groups]
        comparisons.append(replace(asked, blocks=blocks, ranks=ranks_of(blocks, own_groups, asked)))
    return comparisons


def measure_of(runs: Sequence[RunRecord], metric: str) -> tuple[Measure, dict[str, int]]:
    """Return the figure of a name, and the signs of the runs' tasks. ``accuracy`` is also the first figure of a task.

    :raises ConfigError: it is not known whether more of it is better.
    """
    signs = {name: sign for run in runs for name, sign in run.signs.items()}
    if metric == ACCURACY.name and runs and all(run.signs for run in runs):
        metric = runs[0].figure
    return Measure.of(metric, signs), signs


def _only(groups: Sequence[Group], runs: Sequence[RunRecord]) -> list[Group]:
    """Return groups with these runs alone, without rows and groups that have none of them."""
    records = {run.path: run for run in runs}
    kept = []
    for group in groups:
        rows = {label: [records[run.path] for run in runs if run.path in records] for label, runs in group.rows.items()}
        if any(rows.values()):
            kept.append(replace(group, rows={label: runs for label, runs in rows.items() if runs}))
    return kept


def _check_columns(
    words: Sequence[str], measure: str, kept: Mapping[str, Sequence[RunRecord]], round: int | None
) -> None:
    """Refuse columns that no protocol has.

    :raises UnknownNameError: with the word.
    """
    recorded: dict[str, None] = {}
    for protocol, runs in kept.items():
        for run in runs:
            figures = run.figures(protocol, round)
            recorded |= dict.fromkeys(name for name in figures if number(figures[name]) is not None)
    known = dict.fromkeys([SEEDS, DIFFERENCE, P, CLIENTS, "costs", *COSTS, measure, *recorded])
    for word in words:
        if word not in known and "." not in word:
            raise UnknownNameError("column", word, known)


def _differ_in_rounds_alone(groups: Sequence[Group]) -> bool:
    """Return whether two groups differ in their number of rounds, and in nothing else."""
    rest = [key({name: value for name, value in group.settings.items() if name != "rounds"}) for group in groups]
    return len(set(rest)) < len(rest)


def _own_settings(groups: Sequence[Group]) -> list[str]:
    """Return the options of training that give each method a table of its own; empty if a table has two methods."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    labels = {label for group in groups for label in group.rows}
    alone = len(groups) == len(labels) > 1 and all(len(group.rows) == 1 for group in groups)
    return list(names) if alone and names.keys().isdisjoint([*PARTITION_OPTIONS, "labels", "rounds"]) else []


def check_reported(runs: Sequence[RunRecord], names: Sequence[str], round: int | None = None) -> None:
    """Refuse figures of plugins' reports that no run has.

    :raises ConfigError: with the name.
    """
    if absent := [name for name in names if all(run.reported(name, round) is None for run in runs)]:
        raise ConfigError(
            f"no run has a number {absent[0]!r} in its reports; write PLUGIN.NAME, such as attack.success. If a plugin "
            "could not measure it, metrics.jsonl has the reason"
        )
