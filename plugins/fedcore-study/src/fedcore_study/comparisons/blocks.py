"""A block of a comparison: rows, differences to the baseline, cautions and findings; ranks over the blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedcore import ConfigError
from fedcore.tools import PARTITION_OPTIONS, key, settings
from fedcore_study.comparisons.cautions import (
    ended_early,
    failed_clients,
    few_pairs,
    few_seeds,
    global_models,
    no_baseline,
    other_clients,
    other_data,
    other_models,
    other_rounding,
    other_seeds,
    other_sources,
    own_models,
    plugin_notes,
    restarted_schedules,
)
from fedcore_study.comparisons.comparison import CLIENTS, Block, Comparison, Row, same_seeds
from fedcore_study.comparisons.costs import COSTS
from fedcore_study.comparisons.fairness import FIGURES, Spread
from fedcore_study.comparisons.figures import Difference, Figure, corrected, paired_difference
from fedcore_study.comparisons.findings import findings
from fedcore_study.comparisons.groups import NAME, Group, by_seed
from fedcore_study.comparisons.records import OVER_CLIENTS, RunRecord
from fedcore_study.comparisons.significance import Ranks, level, ranked
from fedcore_study.comparisons.tuned import at_which
from fedcore_study.lenient import mapping_in, number


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
        *plugin_notes(group.rows),
        failed_clients(group.rows, asked.round),
        other_clients(group.rows, asked.protocol, asked.round),
        no_baseline(plain) if baseline is None else "",
        few_seeds(differences.values()),
        other_seeds(values),
        other_data(group.rows),
        other_sources(group.rows),
        global_models(group.rows),
        at_which(group.rows, asked.tuned, asked.protocol),
        *other_rounding(group.rows, asked.by),
        ended_early(group.rows) if asked.round is None else "",
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
