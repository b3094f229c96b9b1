"""Runs joined to a comparison: a block for runs with the same settings, a row per method, figures over seeds.

Figures are only averaged over seeds. Runs that differ in a setting other than the seed and the rows' options are in
different blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import PARTITION_OPTIONS, PROTOCOLS, Json, key, method, settings, short_name
from fedcore.tools import protocols as evaluation
from fedcore_study.comparisons.cautions import (
    failed_clients,
    few_pairs,
    few_seeds,
    global_models,
    no_baseline,
    other_clients,
    other_models,
    other_seeds,
    other_sources,
    own_models,
    restarted_schedules,
)
from fedcore_study.comparisons.costs import COSTS, EACH
from fedcore_study.comparisons.fairness import FIGURES, Spread
from fedcore_study.comparisons.figures import Difference, Figure, corrected, paired_difference
from fedcore_study.comparisons.findings import findings
from fedcore_study.comparisons.groups import NAME, Group, by_seed, distinct, group_runs, option, relabelled
from fedcore_study.comparisons.measures import ACCURACY, Measure
from fedcore_study.comparisons.records import OVER_CLIENTS, RunRecord, Warn, with_global_model
from fedcore_study.comparisons.significance import Ranks, level, ranked
from fedcore_study.comparisons.tuned import at_which, tuned_runs
from fedcore_study.lenient import mapping_in, number
from fedcore_study.words import named

BASELINE = "fedavg"

SEEDS, DIFFERENCE, P, CLIENTS = "seeds", "difference", "p", "clients"
"""Words of ``--columns`` that are no figure."""


@dataclass(frozen=True)
class Row:
    """One method (or other value of the rows' options) over seeds. Each figure is over the seeds that have it."""

    label: str
    values: dict[int, float]
    """The figure that is compared, by seed."""
    summary: Figure | None
    """The mean of the values."""
    difference: Difference | None
    """The difference to the baseline, paired by seed."""
    rounds: Figure | None
    """The rounds until the target is reached."""
    bytes: Figure | None
    """The bytes until the target is reached."""
    virtual: Figure | None
    """The seconds of the simulated system until the target is reached."""
    clients: dict[str, Figure | None]
    """How the figure is spread over the clients, by the names in ``fairness.FIGURES``."""
    each: dict[str, Figure | None]
    """The figure of each client by its name, if it is asked for; None for a client for which it is not defined."""
    reported: dict[str, Figure | None]
    """Numbers that plugins reported, by ``PLUGIN.NAME``."""
    metrics: dict[str, Figure | None]
    """The metrics next to accuracy, without the one that is compared."""
    costs: dict[str, Figure | None]
    """The costs by the names in ``costs.COSTS``."""
    asked: dict[str, Figure | None]
    """The figures of the protocol that the columns ask for, by their names in ``summary.json``."""


@dataclass(frozen=True)
class Block:
    """Rows that share all settings except for their own."""

    settings: dict[str, Json]
    """The settings in which blocks differ."""
    baseline: str | None
    rows: list[Row]
    notes: list[str]
    """Cautions for a reader, such as a baseline with another model or too few seeds."""
    findings: list[str]
    """The results in sentences."""


def same_seeds(rows: Iterable[Row]) -> bool:
    """Return whether all rows have the same seeds. Means over different seeds also differ by the seeds."""
    return len({frozenset(row.values) for row in rows}) <= 1


@dataclass(frozen=True)
class Comparison:
    """All blocks, and the question that they answer. Accuracies are fractions, times are seconds."""

    protocol: str
    by: list[str]
    """What makes a row: ``plugin`` and options of a run."""
    round: int | None = None
    """The number of rounds after which the runs are compared; None for their end."""
    target: float | None = None
    confidence: float = 0.95
    common: dict[str, Json] = field(default_factory=dict)
    """The settings that all blocks share."""
    blocks: list[Block] = field(default_factory=list)
    by_client: bool = False
    """Whether tables show how the figure is spread over the clients."""
    reported: Sequence[str] = ()
    """Figures of plugins' reports that tables show, as ``PLUGIN.NAME``."""
    columns: Sequence[str] = ()
    """The words of the columns that tables show; empty for the usual ones."""
    ranks: Ranks | None = None
    """The methods' ranks over the blocks, if these are of different data."""
    measure: Measure = ACCURACY
    """The figure that is compared."""
    tuned: Sequence[str] = ()
    """The options of which each row has its own values."""
    signs: Mapping[str, int] = field(default_factory=dict)
    """The figures of the runs' tasks, if these have no accuracy: 1 if more of a figure is better, -1 if less is."""

    @property
    def notes(self) -> list[str]:
        """The notes of all blocks. A note that some blocks do not have begins with the names of those that have it."""
        where: dict[str, list[str]] = {}
        for block in self.blocks:
            for note in block.notes:
                where.setdefault(note, []).append(named(block.settings))
        return [
            note if len(titles) == len(self.blocks) else f"{' and '.join(titles)}: {note}"
            for note, titles in where.items()
        ]

    @property
    def heading(self) -> str:
        """The heading of the column of rows: ``method``, or options of a run."""
        return ", ".join("method" if name == "plugin" else name for name in self.by)


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
    signs = {name: sign for run in runs for name, sign in run.signs.items()}
    if metric == ACCURACY.name and runs and all(run.signs for run in runs):
        metric = runs[0].figure
    measure = Measure.of(metric, signs)
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

    chosen, own = tuned_runs(runs, fields, tuned)
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


def check_reported(runs: Sequence[RunRecord], names: Sequence[str], round: int | None = None) -> None:
    """Refuse figures of plugins' reports that no run has.

    :raises ConfigError: with the name.
    """
    if absent := [name for name in names if all(run.reported(name, round) is None for run in runs)]:
        raise ConfigError(
            f"no run has a number {absent[0]!r} in its reports; write PLUGIN.NAME, such as attack.success. If a plugin "
            "could not measure it, metrics.jsonl has the reason"
        )


def ranks_of(blocks: Sequence[Block], groups: Sequence[Group], asked: Comparison) -> Ranks | None:
    """Rank the rows that all blocks have.

    :param groups: the runs of each block.
    :returns: None if two blocks have a partition in common, which would count twice, or the rows of a block different
        seeds.
    """
    data = [{(run.partition, run.labels) for runs in group.rows.values() for run in runs} for group in groups]
    if len(set.union(*data)) < sum(map(len, data)):
        return None
    everywhere = set.intersection(*({row.label for row in block.rows} for block in blocks))
    if not all(same_seeds(row for row in block.rows if row.label in everywhere) for block in blocks):
        return None
    sign = asked.measure.sign
    means = [{row.label: sign * row.summary.mean for row in block.rows if row.summary} for block in blocks]
    return ranked(means, level(asked.confidence))


def usable(
    runs: Sequence[RunRecord], protocol: str, round: int | None, warn: Warn, metric: str = "accuracy"
) -> list[RunRecord]:
    """Return the runs that have a figure of a protocol, and warn of the others.

    :raises ConfigError: no run has one.
    """
    if not runs:
        raise ConfigError("there is no run to compare yet")
    if round is None:
        unfinished = [run for run in runs if not run.finished]
        for run in unfinished:
            warn(f"{run.path} is not finished ({len(run.rounds)} of {run.config.rounds} rounds) and is left out")
        runs = [run for run in runs if run.finished]
        if not runs:
            reached = min(len(run.rounds) for run in unfinished)
            hint = f": --round {reached}" if reached else ""
            raise ConfigError(f"no run is finished; compare them at a round that all have reached{hint}")
    if any(protocol in run.protocols for run in runs):
        runs = [with_global_model(run, protocol) for run in runs]
    kept, without = [], []
    for run in runs:
        if run.at(protocol, round) is not None:
            kept.append(run)
        elif round is None or protocol not in run.protocols:
            without.append(run)
        else:
            warn(f"{run.path} was not evaluated after round {round} and is left out")
    if len(without) == 1:
        warn(f"{without[0].path} has no figures for protocol {protocol!r} and is left out")
    elif without and kept:
        others = ", ".join(sorted({name for run in without for name in run.protocols}))
        hint = f"; they have {others} (--protocol)" if others else ""
        warn(
            f"{len(without)} runs have no figures for protocol {protocol!r} and are left out: {_methods(without)}{hint}"
        )
    if not kept:
        protocols = sorted({name for run in runs for name in run.protocols})
        if protocol in protocols:
            raise ConfigError(f"no run was evaluated after {round} rounds under protocol {protocol!r}")
        raise ConfigError(
            f"no run has figures for protocol {protocol!r}; there are: {', '.join(protocols) or 'none'}. "
            "Choose with --protocol"
        )
    measured = [run for run in kept if metric in run.figures(protocol, round)]
    if not measured:
        metrics = [name for name in kept[0].metrics(protocol, round) if not name.endswith(OVER_CLIENTS)]
        raise ConfigError(
            f"no run measured {metric!r} for protocol {protocol!r}; metrics of {kept[0].path}: "
            f"{', '.join(metrics) or 'none'}. --metric of train and resume adds one"
        )
    if unmeasured := [run for run in kept if run not in measured]:
        warn(f"runs that did not measure {metric!r} are left out: {_methods(unmeasured)}")
    return measured


def _methods(runs: Iterable[RunRecord]) -> str:
    """Return the methods of runs, each with its number of runs."""
    counted = Counter(method({short_name(name): {} for name in settings(run.config)["plugins"]}) for run in runs)
    return ", ".join(f"{name} ({number})" for name, number in counted.items())


def block_of(group: Group, asked: Comparison, baseline: str | None) -> Block:
    """Compare the runs of a group, which all have the figure.

    :param asked: the comparison, whose blocks do not matter yet.
    :param baseline: the label of the row that differences are to, by default the only row of fedavg.
    """
    seeds = {label: by_seed(runs) for label, runs in group.rows.items()}
    plain = []
    if {"plugin", NAME} & {*asked.by}:
        plain = [label for label, runs in group.rows.items() if not settings(runs[0].config)["plugins"]]
    against = baseline or (plain[0] if len(plain) == 1 else None)
    if against not in group.rows:
        against = None
    _check_clients(seeds)
    values = {
        label: {
            seed: value
            for seed, run in sorted(runs.items())
            if (value := number(run.figures(asked.protocol, asked.round).get(asked.measure.name))) is not None
        }
        for label, runs in seeds.items()
    }
    differences: dict[str, Difference | None] = {}
    if against is not None:
        paired_differences = {}
        for label in (label for label in seeds if label != against):
            common = pairs(seeds[label], seeds[against])
            paired = {seed: values[against][seed] for seed in common if seed in values[against]}
            paired_differences[label] = paired_difference(values[label], paired, asked.confidence)
        differences = corrected(paired_differences, asked.confidence)
    rows = [_row(label, runs.values(), values[label], differences.get(label), asked) for label, runs in seeds.items()]
    notes = [
        f"no run of the baseline {baseline!r}, hence no differences" if baseline and against is None else "",
        *few_pairs(differences, seeds, against),
        other_models(group.rows, against) if against is not None else "",
        failed_clients(group.rows, asked.round),
        other_clients(group.rows, asked.protocol, asked.round),
        no_baseline(plain) if baseline is None else "",
        few_seeds(differences.values()),
        other_seeds(values),
        other_sources(group.rows),
        global_models(group.rows),
        at_which(group.rows, asked.tuned),
        restarted_schedules(group.rows),
        *own_models(group.rows, asked.protocol),
    ]
    summaries = {row.label: row.summary for row in rows}
    sentences = findings(
        summaries, differences, against, asked.confidence, asked.measure, one_set_of_seeds=same_seeds(rows)
    )
    return Block(group.settings, against, rows, [note for note in notes if note], sentences)


def pairs(runs: Mapping[int, RunRecord], others: Mapping[int, RunRecord]) -> list[int]:
    """Return the seeds that two rows have in common with the same samples on each client."""
    return sorted(seed for seed in runs if seed in others and runs[seed].partition == others[seed].partition)


def _row(
    label: str,
    runs: Collection[RunRecord],
    values: dict[int, float],
    difference: Difference | None,
    asked: Comparison,
) -> Row:
    protocol, target, round = asked.protocol, asked.target, asked.round
    reached = [point for run in runs if target and (point := run.reached(protocol, target, round)) is not None]
    spreads = [Spread.of(run.figures(protocol, round), asked.measure) for run in runs]
    metrics = [run.metrics(protocol, round) for run in runs]
    return Row(
        label,
        values,
        summary=Figure.of(values.values()),
        difference=difference,
        rounds=Figure.of(point.rounds for point in reached),
        bytes=Figure.of(point.bytes for point in reached),
        virtual=Figure.of(point.virtual for point in reached),
        clients={name: Figure.of(getattr(spread, name) for spread in spreads) for name in FIGURES},
        each=_each(runs, asked),
        reported={name: Figure.of(run.reported(name, round) for run in runs) for name in asked.reported},
        metrics={
            name: Figure.of(of_run.get(name) for of_run in metrics)
            for name in dict.fromkeys(name for of_run in metrics for name in of_run)
            if name.replace(OVER_CLIENTS, "_mean") != asked.measure.name
        },
        costs={name: Figure.of(cost.measured(run, round) for run in runs) for name, cost in COSTS.items()},
        asked={
            name: Figure.of(number(run.figures(protocol, round).get(name)) for run in runs) for name in asked.columns
        },
    )


def _each(runs: Collection[RunRecord], asked: Comparison) -> dict[str, Figure | None]:
    """Return the figure of each measured client by its name, in the order of the clients; empty if it is not asked for.

    A client without a name is another one under each seed, so that its mean is of no client: it has to be asked for.
    """
    if not (CLIENTS in asked.columns or (asked.by_client and all(run.client_names for run in runs))):
        return {}
    values: dict[str, list[float | None]] = {}
    for run in runs:
        row = run.figures(asked.protocol, asked.round)
        own = asked.measure.of_clients(row)
        measured = {client for name in row if name.endswith("per_client") for client in mapping_in(row, name)}
        for client in sorted(measured, key=lambda client: (len(client), client)):
            values.setdefault(run.client(client), []).append(number(own.get(client)))
    return {name: Figure.of(each) for name, each in values.items()}


def _check_clients(rows: Mapping[str, Mapping[int, RunRecord]]) -> None:
    """Refuse runs with the same options of the partition and the same seed, but other samples on the clients."""
    splits: dict[str, RunRecord] = {}
    for runs in rows.values():
        for run in runs.values():
            values = settings(run.config)
            other = splits.setdefault(key([values[name] for name in (*PARTITION_OPTIONS, "seed")]), run)
            if run.partition != other.partition:
                raise ConfigError(
                    f"{other.path} and {run.path} have the same settings and seed, but their clients hold different "
                    "samples (partition.json): another data set or partition file under the same name. "
                    "Compare them one by one"
                )
