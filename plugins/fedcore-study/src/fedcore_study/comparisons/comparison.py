"""Runs joined to a comparison: the same settings in one block, a row per method, figures over seeds.

Runs that differ in anything but the rows' options and the seed stand in different blocks; nothing else is averaged.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedcore import ConfigError, UnknownNameError
from fedcore.base.config import Json
from fedcore.base.identity import PARTITION_OPTIONS, key, method, settings, short_name
from fedcore.base.protocols import ON_CLIENTS, PROTOCOLS
from fedcore_study.comparisons.cautions import (
    failed_clients,
    few_seeds,
    no_baseline,
    other_models,
    other_seeds,
    own_models,
    restarted_schedules,
)
from fedcore_study.comparisons.figures import Difference, Figure, corrected, paired_difference
from fedcore_study.comparisons.findings import findings
from fedcore_study.comparisons.groups import Group, by_seed, distinct, field, grouped
from fedcore_study.comparisons.records import Evaluation, RunRecord, Warn
from fedcore_study.comparisons.significance import Ranks, level, ranked

BASELINE = "fedavg"

DATA = (*PARTITION_OPTIONS, "labels")
"""What makes the data of a block: the data set and who holds what of it."""

CLIENT_FIGURES = ("mean", "std", "worst", "best", "variance", "jain")
"""Figures of :class:`fedcore_study.comparisons.fairness.Spread`."""


@dataclass(frozen=True)
class Row:
    """One method (or other value of the rows' options) over seeds.

    :param accuracy: by seed; ``summary`` of them. ``rounds``, ``bytes`` and ``virtual`` (seconds of the simulated
        system): to reach the target, over the seeds that do. ``difference`` is to the baseline, paired by seed.
    :param clients: how the accuracy is spread over the clients, by ``CLIENT_FIGURES``: over seeds.
    """

    label: str
    accuracy: dict[int, float]
    summary: Figure | None
    difference: Difference | None
    rounds: Figure | None
    bytes: Figure | None
    seconds: Figure | None
    virtual: Figure | None
    clients: dict[str, Figure | None]
    reported: dict[str, Figure | None]
    """Numbers that plugins reported, over the seeds that have them: by ``PLUGIN.NAME``."""
    metrics: dict[str, Figure | None] = dataclasses.field(default_factory=dict)
    """The metrics next to accuracy that a run of the row recorded, each over the seeds that have it."""


@dataclass(frozen=True)
class Block:
    """Rows that share all settings but the rows' own; ``settings`` are those in which blocks differ.

    :param notes: what a reader has to know: a baseline with another model, too few seeds.
    :param findings: what the block shows, in sentences.
    """

    settings: dict[str, Json]
    baseline: str | None
    rows: list[Row]
    notes: list[str]
    findings: list[str]


def same_seeds(rows: Iterable[Row]) -> bool:
    """Return whether all rows have the same seeds. Means over different seeds show the seeds, too."""
    return len({frozenset(row.accuracy) for row in rows}) <= 1


@dataclass(frozen=True)
class Comparison:
    """All blocks, with what they were made of: accuracies are fractions, times seconds.

    :param by_client: whether tables show how the accuracy is spread over the clients.
    """

    protocol: str
    by: list[str]
    round: int | None
    target: float | None
    confidence: float
    common: dict[str, Json]
    blocks: list[Block]
    by_client: bool = False
    reported: Sequence[str] = ()
    """Figures of plugins' reports that tables show, as ``PLUGIN.NAME``."""
    ranks: Ranks | None = None
    """The methods' ranks over the blocks, if these are of different data."""

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of the blocks, each said once, with the block where not all have it."""
        where: dict[str, list[str]] = {}
        for block in self.blocks:
            for note in block.notes:
                name = ", ".join(f"{name} {value}" for name, value in block.settings.items())
                where.setdefault(note, []).append(name)
        return [
            note if len(named) == len(self.blocks) else f"{' and '.join(named)}: {note}"
            for note, named in where.items()
        ]

    @property
    def heading(self) -> str:
        """What the rows are: ``method``, or options of a run."""
        return ", ".join("method" if name == "plugin" else name for name in self.by)


def compare(
    runs: Sequence[RunRecord],
    *,
    protocol: str = "global",
    by: Sequence[str] = ("plugin",),
    baseline: str | None = None,
    target: float | None = None,
    round: int | None = None,
    confidence: float = 0.95,
    by_client: bool = False,
    reported: Sequence[str] = (),
    warn: Warn = lambda message: None,
) -> Comparison:
    """Compare runs by seed.

    :param by: what makes a row: ``plugin`` and options of a run.
    :param baseline: label of the row that differences are to; default the row of fedavg where a block has one.
    :param target: accuracy in (0, 1] whose first reaching is counted in rounds and bytes.
    :param round: compare after so many rounds, unfinished runs included; default at the end of finished runs.
    :param by_client: show how the accuracy is spread over the clients, for a protocol that these measure.
    :param reported: figures of plugins' reports to show, such as ``attack.success``.
    :raises ConfigError: nothing to compare, names that do not exist, or runs that contradict one another: the same
        settings and seed twice, or split among the clients otherwise.
    """
    fields = [field(name) for name in by]
    if protocol not in PROTOCOLS:
        raise UnknownNameError("protocol", protocol, PROTOCOLS)
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target is {target}; accuracies are fractions, for example --target 0.8")
    if by_client and not PROTOCOLS[protocol].on_clients:
        names = ", ".join(f"--protocol {name}" for name in ON_CLIENTS)
        raise ConfigError(f"--clients: protocol {protocol!r} has no figures by client; these have: {names}")
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence is {confidence}; write a fraction such as 0.95")
    kept = distinct(usable(runs, protocol, round, warn), fields, warn)
    common, groups = grouped(kept, fields)
    if baseline is not None and not any(baseline in group.rows for group in groups):
        raise UnknownNameError("baseline", baseline, {label for group in groups for label in group.rows})
    if round is not None and _differ_in_rounds_alone(groups):
        warn(
            f"runs with other --rounds stand in tables of their own, also after round {round}: a schedule or a method "
            "can depend on --rounds. To see them in one table: --by plugin --by rounds"
        )
    check_reported(kept, reported, round)
    made = [
        _block(group.rows, group.settings, fields, baseline, protocol, target, round, confidence, reported, warn)
        for group in groups
    ]
    rows_by = ["plugin" if name == "plugins" else name for name in fields]
    ranks = _ranks(made, confidence)
    return Comparison(protocol, rows_by, round, target, confidence, common, made, by_client, reported, ranks)


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
            f"no run has a number {absent[0]!r} in its reports; write PLUGIN.NAME, such as attack.success"
        )


def _ranks(blocks: Sequence[Block], confidence: float) -> Ranks | None:
    """Rank the rows that all blocks have, unless two blocks have the same data, which would count twice, or the rows
    of a block have different seeds.
    """
    data = [key([block.settings.get(name) for name in DATA]) for block in blocks]
    if len(set(data)) < len(data):
        return None
    everywhere = set.intersection(*({row.label for row in block.rows} for block in blocks))
    if not all(same_seeds(row for row in block.rows if row.label in everywhere) for block in blocks):
        return None
    means = [{row.label: row.summary.mean for row in block.rows if row.summary} for block in blocks]
    return ranked(means, level(confidence))


def usable(runs: Sequence[RunRecord], protocol: str, round: int | None, warn: Warn) -> list[RunRecord]:
    """Return the runs that have the figure, and say which have not."""
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
        counted = Counter(method({short_name(name): {} for name in settings(run.config)["plugins"]}) for run in without)
        said = ", ".join(f"{name} ({number})" for name, number in counted.items())
        warn(f"{len(without)} runs have no figures for protocol {protocol!r} and are left out: {said}")
    if not kept:
        there = sorted({name for run in runs for name in run.protocols})
        if protocol in there:
            raise ConfigError(f"no run was evaluated after {round} rounds under protocol {protocol!r}")
        raise ConfigError(
            f"no run has figures for protocol {protocol!r}; there are: {', '.join(there) or 'none'}. "
            "Choose with --protocol"
        )
    return kept


def _block(
    rows: Mapping[str, list[RunRecord]],
    shown: dict[str, Json],
    fields: Sequence[str],
    baseline: str | None,
    protocol: str,
    target: float | None,
    round: int | None,
    confidence: float,
    reported: Sequence[str],
    warn: Warn,
) -> Block:
    seeds = {label: by_seed(runs) for label, runs in rows.items()}
    plain = [label for label in rows if "plugins" in fields and not settings(rows[label][0].config)["plugins"]]
    against = baseline or (plain[0] if len(plain) == 1 else None)
    if baseline and baseline not in rows:
        against = None
        where = ", ".join(f"{name}={value}" for name, value in shown.items())
        warn(f"{where}: no run of the baseline {baseline!r}, hence no differences")
    _check_clients(seeds)
    accuracies = {
        label: {seed: _at(run, protocol, round).accuracy for seed, run in sorted(runs.items())}
        for label, runs in seeds.items()
    }
    differences: dict[str, Difference | None] = {}
    if against is not None:
        others = [label for label in seeds if label != against]
        found = {label: _difference(label, against, seeds, accuracies, confidence, warn) for label in others}
        differences = corrected(found, confidence)
    made = [
        _row(label, runs, accuracies[label], differences.get(label), protocol, target, round, reported)
        for label, runs in seeds.items()
    ]
    notes = [
        other_models(rows, against) if against is not None else "",
        failed_clients(rows, round),
        no_baseline(plain) if baseline is None else "",
        few_seeds(row.difference for row in made),
        other_seeds({row.label: row.accuracy for row in made}),
        restarted_schedules(rows),
        *own_models(rows, protocol),
    ]
    summaries = {row.label: row.summary for row in made}
    said = findings(summaries, differences, against, confidence, one_set_of_seeds=same_seeds(made))
    return Block(shown, against, made, [note for note in notes if note], said)


def _difference(
    label: str,
    baseline: str,
    seeds: Mapping[str, Mapping[int, RunRecord]],
    accuracies: Mapping[str, Mapping[int, float]],
    confidence: float,
    warn: Warn,
) -> Difference | None:
    """Return a row's difference to the baseline over the pairs of runs, and say which seeds have no pair.

    :param seeds: the rows' runs by seed.
    """
    # Runs whose samples were split otherwise are no pairs, even with the same seed.
    pairs = {
        seed: accuracies[baseline][seed]
        for seed, run in seeds[baseline].items()
        if _same_clients(run, seeds[label].get(seed))
    }
    difference = paired_difference(accuracies[label], pairs, confidence)
    if difference is None:
        warn(f"{label} and {baseline} have no seed with the same clients in common, hence no difference")
    elif difference.n < len(seeds[label]):
        warn(f"{label}: only {difference.n} of {len(seeds[label])} seeds have a pair in {baseline}")
    return difference


def _row(
    label: str,
    runs: Mapping[int, RunRecord],
    accuracy: dict[int, float],
    difference: Difference | None,
    protocol: str,
    target: float | None,
    round: int | None,
    reported: Sequence[str],
) -> Row:
    reached = [point for run in runs.values() if target and (point := run.reached(protocol, target, round)) is not None]
    seconds = [s for run in runs.values() if (s := run.seconds_per_round(round)) is not None]
    return Row(
        label,
        accuracy,
        Figure.of(list(accuracy.values())),
        difference,
        Figure.of([point.rounds for point in reached]),
        Figure.of([point.bytes for point in reached]),
        Figure.of(seconds),
        Figure.of([point.virtual for point in reached if point.virtual is not None]),
        _over_clients(runs.values(), protocol, round),
        {
            name: Figure.of([v for run in runs.values() if (v := run.reported(name, round)) is not None])
            for name in reported
        },
        _metrics(runs.values(), protocol, round),
    )


def _metrics(runs: Iterable[RunRecord], protocol: str, round: int | None) -> dict[str, Figure | None]:
    """Return the metrics of runs, each over the runs that have it."""
    found = [run.metrics(protocol, round) for run in runs]
    names = dict.fromkeys(name for values in found for name in values)
    known = {name: [value for values in found if (value := values.get(name)) is not None] for name in names}
    return {name: Figure.of(values) for name, values in known.items()}


def _over_clients(runs: Iterable[RunRecord], protocol: str, round: int | None) -> dict[str, Figure | None]:
    """Return the figures of the spread over clients, each over the runs that have it."""
    spreads = [spread for run in runs if (spread := run.spread(protocol, round)) is not None]
    values = {name: [getattr(spread, name) for spread in spreads] for name in CLIENT_FIGURES}
    return {name: Figure.of([value for value in found if value is not None]) for name, found in values.items()}


def _check_clients(rows: Mapping[str, Mapping[int, RunRecord]]) -> None:
    """Refuse runs that say they split the same way with the same seed, but whose clients hold other samples."""
    splits: dict[str, RunRecord] = {}
    for runs in rows.values():
        for run in runs.values():
            values = settings(run.config)
            other = splits.setdefault(key([values[name] for name in (*PARTITION_OPTIONS, "seed")]), run)
            if not _same_clients(other, run):
                raise ConfigError(
                    f"{other.path} and {run.path} have the same settings and seed, but their clients hold different "
                    "samples (partition.json): another data set or partition file under the same name. "
                    "Compare them one by one"
                )


def _same_clients(one: RunRecord, other: RunRecord | None) -> bool:
    return other is not None and one.partition == other.partition


def _at(run: RunRecord, protocol: str, round: int | None) -> Evaluation:
    point = run.at(protocol, round)
    assert point is not None  # the others were left out
    return point
