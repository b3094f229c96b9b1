"""The openings of a page and its sections: ranks over data settings; a group's comparison, findings and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedcore.tools import PROTOCOLS, Json, protocols
from fedcore_report.charts import Interval, Intervals, Omitted
from fedcore_report.lines import measure_of
from fedcore_report.lines import named as named_figure
from fedcore_study.tools import (
    Comparison,
    Group,
    Ranks,
    RunRecord,
    as_latex,
    best_rows,
    block_of,
    by_seed,
    client_columns,
    csv_of,
    each_client,
    named,
    pairs,
    plain_rows,
    ranks_of,
    side_by_side,
)


@dataclass(frozen=True)
class Table:
    """Cells as text. The first columns hold words, the others numbers."""

    heads: list[str]
    rows: list[list[str]]
    caption: str = ""
    words: int = 1
    """How many columns hold words."""
    groups: list[tuple[str, int]] = field(default_factory=list)
    """Headings above the columns, each with the number of columns that it spans."""
    best: set[tuple[int, int]] = field(default_factory=set)
    """The row and column of each cell that is the best of its column."""


FINDINGS = 5
"""The largest number of sentences that a reader meets at once."""


def main_protocol(group: Group, asked: str | None) -> str:
    """Return the protocol that comes first: the one that is asked for, else one that the most rows have.

    Of several that all rows have it is ``personal`` where there are own models, else ``global``.
    """
    rows = [{name for run in runs for name in run.protocols} for runs in group.rows.values()]
    if asked is not None and any(asked in measured for measured in rows):
        return asked
    order = dict.fromkeys(("personal", "global", *PROTOCOLS))
    return max(order, key=lambda name: sum(name in measured for measured in rows))


@dataclass
class Opening:
    """The comparison of a group's finished runs under every protocol that measured them."""

    table: Table | None = None
    """Of the protocol that comes first."""
    every: Table | None = None
    """Of all protocols, if there are several."""
    clients: dict[str, Table] = field(default_factory=dict)
    """How the figure is spread over the clients, by protocol; that which comes first is first."""
    each: Table | None = None
    """The figure of each client with a name, such as a hospital, under the first of these protocols."""
    findings: list[str] = field(default_factory=list)
    """The first ``FINDINGS`` sentences on the protocol that comes first."""
    more: list[str] = field(default_factory=list)
    """The other sentences."""
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """The comparison as files, by their ending: csv and tex."""
    intervals: dict[str, Intervals | Omitted] = field(default_factory=dict)
    """The paired differences, by protocol."""


def opening(group: Group, asked: Comparison, main: str, colors: Mapping[str, int], baseline: str | None) -> Opening:
    """Compare a group's finished runs. All is empty if there are none.

    :param main: the protocol that comes first.
    :param asked: the rows' options, the settings that all runs of the page share, and figures of plugins' reports,
        which are shown if the group has them.
    :param colors: the number of each row's colour.
    :param baseline: the row that differences are to, if the group has it; by default fedavg.
    """
    opened, compared = Opening(), dict[str, Comparison]()
    for protocol in PROTOCOLS:
        rows = _measured(group, protocol).rows
        if not rows:
            continue
        runs = [run for runs in rows.values() for run in runs]
        reported = [name for name in asked.reported if any(run.reported(name, None) is not None for run in runs)]
        question = replace(asked, protocol=protocol, common={**asked.common, **group.settings}, reported=reported)
        question = replace(question, measure=measure_of(group), signs=runs[0].signs)
        by_client = replace(question, by_client=PROTOCOLS[protocol].on_clients)
        block = block_of(Group({}, rows), by_client, baseline if baseline in rows else None)
        compared[protocol] = replace(question, blocks=[block])
        opened.intervals[protocol] = _intervals(compared[protocol], rows, colors)
    if not compared:
        return opened
    first = main if main in compared else next(iter(compared))
    opened.table = _table({first: compared[first]})
    opened.every = _table(compared) if len(compared) > 1 else None
    on_clients = [name for name in dict.fromkeys([first, *compared]) if PROTOCOLS[name].on_clients]
    opened.clients = {name: _client_table(compared[name]) for name in on_clients}
    opened.each = _table_of_each(compared[on_clients[0]]) if on_clients else None
    csv, tex = list[dict[str, Json]](), list[str]()
    shown = tuple(f"--protocol {protocol}" for protocol in compared)  # a note on a protocol that is not shown ends so
    for protocol, comparison in compared.items():
        (block,) = comparison.blocks
        sentences = [f"{protocol}: {sentence}" for sentence in block.findings]
        opened.findings += sentences[:FINDINGS] if protocol == first else []
        opened.more += sentences[FINDINGS:] if protocol == first else sentences
        opened.notes += [note for note in block.notes if note not in opened.notes and not note.endswith(shown)]
        csv += plain_rows(comparison)
        tex.append(as_latex([comparison], label=f"tab:comparison-{protocol}"))
    opened.files = {"csv": csv_of(csv), "tex": "\n".join(tex)}
    return opened


@dataclass(frozen=True)
class Ranking:
    """Methods ranked over data settings by the compared figure under one protocol."""

    protocol: str
    table: Table
    chart: Intervals


def rankings(groups: Sequence[Group], asked: Comparison, colors: Mapping[str, int]) -> list[Ranking]:
    """Rank the rows under every protocol, over two data settings or more; for fewer than three rows there are no ranks.

    :param asked: the rows' options.
    :param colors: the number of each row's colour.
    """
    ranked = []
    for protocol in protocols.EVALUATED:
        measured = [group for each in groups if (group := _measured(each, protocol)).rows]
        measure = measure_of(measured[0]) if measured else asked.measure
        measured = [group for group in measured if measure_of(group) == measure]
        question = replace(asked, protocol=protocol, reported=(), measure=measure)
        blocks = [block_of(group, question, None) for group in measured]
        ranks = ranks_of(blocks, measured, question) if blocks else None
        if ranks is not None:
            settings = [named(block.settings) for block in blocks]
            ranked.append(_ranking(question, ranks, settings, colors))
    return ranked


def _measured(group: Group, protocol: str) -> Group:
    """Return the finished runs of a group that have figures for a protocol."""
    rows = {label: [run for run in runs if run.final(protocol)] for label, runs in group.rows.items()}
    return Group(group.settings, {label: runs for label, runs in rows.items() if runs})


def _ranking(asked: Comparison, ranks: Ranks, settings: Sequence[str], colors: Mapping[str, int]) -> Ranking:
    protocol = asked.protocol
    order = sorted(ranks.average, key=lambda name: ranks.average[name])
    table = Table(
        heads=[asked.heading, "average rank", *settings],
        rows=[[name, f"{ranks.average[name]:.2f}", *(f"{rank:g}" for rank in ranks.each[name])] for name in order],
        caption=f"Ranks of the mean {asked.measure.name}, {protocol}; 1 is the best. {ranks.verdict}",
        best={(number, 1) for number, name in enumerate(order) if ranks.average[name] == ranks.average[order[0]]},
    )
    reach = ranks.critical / 2
    about = "Rings are the ranks on each data setting, the dot is their mean"
    bars = ", the bar reaches half of Nemenyi's critical difference: bars that overlap are not significantly different."
    chart = Intervals(
        name=f"ranks-{protocol}",
        title=f"Average ranks, {protocol}",
        about=about + (bars if ranks.different else ". Friedman's test finds no difference between them."),
        x_title="rank, 1 is the best",
        differences=False,
        rows=[
            Interval(
                name,
                colors.get(name, number),
                ranks.average[name],
                (ranks.average[name] - reach, ranks.average[name] + reach) if ranks.different else None,
                dict(zip(settings, ranks.each[name], strict=True)),
            )
            for number, name in enumerate(order)
        ],
    )
    return Ranking(protocol, table, chart)


def _table(compared: Mapping[str, Comparison]) -> Table:
    """Join the tables of several protocols side by side. Seeds, figures of plugins and costs are there once."""
    blocks = {protocol: (comparison, comparison.blocks[0]) for protocol, comparison in compared.items()}
    table = side_by_side(blocks, several=True)
    return Table(
        heads=[*table.headings],
        rows=[[*row] for row in table.rows],
        caption=_caption(compared),
        groups=[*table.groups],
        best={*table.best},
    )


def _caption(compared: Mapping[str, Comparison]) -> str:
    name = named_figure(next(iter(compared.values())).measure)
    sentences = [f"{name} at the end: mean ± standard deviation over seeds, the best mean of a column in bold."]
    baselines = dict.fromkeys(comparison.blocks[0].baseline for comparison in compared.values())
    sentences += [f"Differences to {name} are paired by seed, with Student's t interval." for name in baselines if name]
    return " ".join([*sentences, *(f"{protocol}: {PROTOCOLS[protocol].measures}." for protocol in compared)])


def _client_table(comparison: Comparison) -> Table:
    """Return how the figure is spread over the clients."""
    columns = client_columns(comparison.measure)
    return Table(
        heads=[comparison.heading, *(column.heading for column in columns)],
        rows=[[row.label, *(column.cell(row) for column in columns)] for row in comparison.blocks[0].rows],
        caption=f"{named_figure(comparison.measure)} over the clients, {comparison.protocol}, all of the same weight: "
        "mean ± standard deviation over seeds.",
    )


def _table_of_each(comparison: Comparison) -> Table | None:
    """Return the figure of each client with a name, a column per method; None if they have no names."""
    (block,) = comparison.blocks
    columns = each_client(comparison, block)
    if not columns:
        return None
    return Table(
        heads=["client", *(row.label for row in block.rows)],
        rows=[[column.heading, *map(column.cell, block.rows)] for column in columns],
        caption=f"{named_figure(comparison.measure.of_client)} of each client, {comparison.protocol}: mean ± standard "
        "deviation over seeds, the best of a client in bold.",
        best={(n, 1 + place) for n, column in enumerate(columns) for place in best_rows(column, block.rows)},
    )


def _intervals(
    comparison: Comparison, runs: Mapping[str, Sequence[RunRecord]], colors: Mapping[str, int]
) -> Intervals | Omitted:
    """Return the paired differences to the baseline, of each seed and their mean."""
    (block,) = comparison.blocks
    title = f"Differences by seed, {comparison.protocol}"
    if block.baseline is None:
        return Omitted(
            title, "no single row of fedavg has this figure; --baseline names the row that differences are to"
        )
    reference = next(row.values for row in block.rows if row.label == block.baseline)
    drawn, measure = [], comparison.measure
    scale, unit = measure.scale, "percentage points" if measure.unit else measure.name
    for row in block.rows:
        if row.difference is not None:
            paired = pairs(by_seed(runs[row.label]), by_seed(runs[block.baseline]))
            each = {f"seed {seed}": scale * (row.values[seed] - reference[seed]) for seed in paired}
            low, high = row.difference.low, row.difference.high
            ends = None if low is None or high is None else (scale * low, scale * high)
            drawn.append(Interval(row.label, colors[row.label], scale * row.difference.mean, ends, each))
    if not drawn:
        return Omitted(title, f"no other row has a seed with the same clients as {block.baseline}")
    about = (
        f"{named_figure(measure)} minus that of {block.baseline} on the same clients. "
        "Rings are single seeds, the dot is their mean"
    )
    bar = f", the bar its {100 * comparison.confidence:g} % interval."
    return Intervals(
        name=f"differences-{comparison.protocol}",
        title=title,
        about=about + (bar if any(row.ends for row in drawn) else ". These seeds give no interval."),
        x_title=f"{unit} to {block.baseline}",
        rows=drawn,
        digits=measure.digits,
    )
