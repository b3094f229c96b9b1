"""A comparison as text: the cells of its tables, and Markdown, LaTeX, CSV and JSON.

Names may come from a stranger's run. Characters with a meaning to a terminal or in a format are escaped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fedcore.tools import Json, key, method, protocols
from fedcore_study.comparisons.comparison import CLIENTS, DIFFERENCE, SEEDS, Block, Comparison, P, Row, same_seeds
from fedcore_study.comparisons.costs import COSTS, EACH
from fedcore_study.comparisons.fairness import FIGURES, headings
from fedcore_study.comparisons.figures import Difference, Figure
from fedcore_study.comparisons.findings import verdict
from fedcore_study.comparisons.measures import Measure, direction
from fedcore_study.comparisons.significance import p_text
from fedcore_study.tables import Table, csv_of, latex_comment, markdown_text
from fedcore_study.words import counted, joined, named, shown


@dataclass(frozen=True)
class Column:
    """A column of a block's table."""

    heading: str
    cell: Callable[[Row], str]
    """A row's text."""
    rank: Callable[[Row], float | None] = lambda row: None
    """A number that is largest for the best row; None for a row that cannot be the best."""
    once: Literal["", "first", "last"] = ""
    """Where the column stands in a table of several protocols if it is the same under all of them."""


SECONDS = COSTS["s/round"].heading
MINUS = "minus "
NAMED = 12
"""The largest number of clients that have a column each without being asked for."""
TIMES = (SECONDS, COSTS["seconds"].heading)
"""Headings of figures that depend on the machine."""


def table_columns(comparison: Comparison, block: Block) -> list[Column]:
    """Return the columns of a block; the first one holds names, the others numbers."""
    columns = [Column(comparison.heading, lambda row: row.label)]
    if comparison.columns:
        return [*columns, *(column for word in comparison.columns for column in _column(word, comparison, block))]
    columns += [
        *_column(SEEDS, comparison, block),
        _measured(comparison),
    ]
    if comparison.by_client:  # with other figures, differences and costs there would be too many columns to read
        clients = _column(CLIENTS, comparison, block)
        return [*columns, *client_columns(comparison.measure), *(clients if len(clients) <= NAMED else ())]
    columns += [
        *(
            _figures(name, lambda row, name=name: row.metrics.get(name), 1, 4, direction(name, comparison.signs))  # type: ignore[misc]
            for name in metric_names([block])
        ),
        *(_reported(name) for name in comparison.reported),
    ]
    columns += [*_column(DIFFERENCE, comparison, block), *_column(P, comparison, block)]
    if comparison.target is not None:
        goal = f"{comparison.measure.scale * comparison.target:g}{comparison.measure.unit}"
        columns.append(_to_target(f"rounds to {goal}", lambda row: row.rounds, 1.0, 1))
        columns.append(_to_target(f"MB to {goal}", lambda row: row.bytes, 1e-6, 2))
        if any(row.virtual for row in block.rows):
            columns.append(_to_target(f"virtual s to {goal}", lambda row: row.virtual, 1.0, 1))
    return [*columns, *_column("s/round", comparison, block)]


def _column(word: str, comparison: Comparison, block: Block) -> list[Column]:
    """Return the column that a word of ``--columns`` names; none if the block has nothing to show in it."""
    if word == SEEDS:
        return [Column("seeds", lambda row: str(len(row.values)), once="first")]
    if word == DIFFERENCE:
        if block.baseline is None:
            return []
        heading = f"{MINUS}{block.baseline} [{100 * comparison.confidence:g} % interval]"
        return [Column(heading, lambda row: _difference(row.difference, comparison.measure))]
    if word == P:
        tested = any(row.difference is not None and row.difference.corrected is not None for row in block.rows)
        return [Column("p (Holm)", lambda row: _p(row.difference))] if tested else []
    if word in COSTS:
        cost = COSTS[word]
        if not any(row.costs[word] for row in block.rows):
            return []
        return [replace(_figures(cost.heading, lambda row: row.costs[word], 1, cost.digits, 0), once="last")]
    if word == CLIENTS:
        return each_client(comparison, block)
    if word in comparison.reported:
        return [_reported(word)]
    if word == comparison.measure.name:
        return [_measured(comparison)]
    if not any(row.asked[word] for row in block.rows):
        return []
    measure = Measure(word, protocols.SIGNS.get(word) or direction(word.removesuffix("_mean"), comparison.signs))
    heading = f"{word}{measure.unit}"
    return [_figures(heading, lambda row: row.asked[word], measure.scale, measure.digits, measure.sign)]


def _reported(name: str) -> Column:
    """Return the column of a figure of a plugin's reports."""
    return replace(_figures(name, lambda row: row.reported[name], 1, 4, 0), once="first")


def printed(comparisons: Sequence[Comparison], *, wide: bool = False, timed: bool = True) -> list[Table]:
    """Return the tables of a comparison under one or several protocols.

    There is one table per block, with the protocols side by side; or with ``wide`` one with a column per block.

    :param timed: with the columns of seconds, which depend on the machine. Columns that were asked for are there.
    """
    if wide:
        return [_wide(comparisons[0])]
    blocks: dict[str, dict[str, tuple[Comparison, Block]]] = {}
    for comparison in comparisons:
        for block in comparison.blocks:
            blocks.setdefault(key(block.settings), {})[comparison.protocol] = comparison, block
    return [side_by_side(by_protocol, len(comparisons) > 1, timed=timed) for by_protocol in blocks.values()]


def side_by_side(
    compared: Mapping[str, tuple[Comparison, Block]], several: bool = True, *, timed: bool = True
) -> Table:
    """Return the table of a block under several protocols. Seeds, figures of plugins and costs are in it once.

    :param compared: the comparison and its block by protocol.
    :param several: with the names of the protocols above their columns, and before the findings.
    :param timed: as for :func:`printed`.
    """
    shown: list[tuple[str, str]] = []
    cells: dict[str, dict[tuple[str, str], str]] = {}
    best: set[tuple[str, tuple[str, str]]] = set()
    once: dict[str, list[tuple[str, str]]] = {"first": [], "last": []}
    for protocol, (comparison, block) in compared.items():
        for column in table_columns(comparison, block)[1:]:
            if column.heading in TIMES and not timed and not comparison.columns:
                continue
            place = "" if column.once and several else protocol, column.heading
            places = once[column.once] if place[0] == "" else shown
            places += [place] if place not in places else []
            for row in block.rows:
                before = cells.setdefault(row.label, {}).setdefault(place, column.cell(row))
                if column.cell(row) not in before.split(" / "):
                    cells[row.label][place] = f"{before} / {column.cell(row)}"
            best |= {(block.rows[number].label, place) for number in best_rows(column, block.rows)}
    (first, _), *_ = compared.values()
    places = [*once["first"], *shown, *once["last"]]
    labels = list(cells)
    spans = Counter(protocol for protocol, _ in shown)
    heads = [("", 1 + len(once["first"])), *spans.items(), ("", len(once["last"]))]
    return Table(
        named(next(block.settings for _, block in compared.values())),
        [first.heading, *(heading for _, heading in places)],
        [[label, *(of_row.get(place, "-") for place in places)] for label, of_row in cells.items()],
        sorted((labels.index(label), 1 + places.index(place)) for label, place in best),
        [
            f"{protocol}: {finding}" if several else finding
            for protocol, (_, block) in compared.items()
            for finding in block.findings
        ],
        [span for span in heads if span[1]] if several else [],
    )


def _wide(comparison: Comparison) -> Table:
    """Return a table with a row per method and a column per block: the figure that is compared."""
    column, blocks = _measured(comparison), comparison.blocks
    labels = list(dict.fromkeys(row.label for block in blocks for row in block.rows))
    cells = [{row.label: column.cell(row) for row in block.rows} for block in blocks]
    best = [
        (labels.index(block.rows[number].label), place)
        for place, block in enumerate(blocks, start=1)
        for number in best_rows(column, block.rows)
    ]
    return Table(
        column.heading,
        [comparison.heading, *(named(block.settings) or column.heading for block in blocks)],
        [[label, *(of_block.get(label, "-") for of_block in cells)] for label in labels],
        best,
        [
            f"{named(block.settings)}: {finding}" if named(block.settings) else finding
            for block in blocks
            for finding in block.findings
        ],
    )


def _measured(comparison: Comparison) -> Column:
    """Return the column of the figure that is compared."""
    measure = comparison.measure
    heading = f"{measure.name}{measure.unit}"
    return _figures(heading, lambda row: row.summary, measure.scale, measure.digits, measure.sign)


def metric_names(blocks: Iterable[Block]) -> list[str]:
    """Return the further metrics that any row has."""
    return list(dict.fromkeys(name for block in blocks for row in block.rows for name in row.metrics))


def client_names(blocks: Iterable[Block]) -> list[str]:
    """Return the clients whose figure any row has."""
    return list(dict.fromkeys(name for block in blocks for row in block.rows for name in row.each))


def each_client(comparison: Comparison, block: Block) -> list[Column]:
    """Return a column with the figure of each client, if the comparison asks for them."""
    own = comparison.measure.of_client
    return [
        _figures(f"{name}{own.unit}", lambda row, name=name: row.each.get(name), own.scale, own.digits, own.sign)  # type: ignore[misc]
        for name in client_names([block])
    ]


def client_columns(measure: Measure) -> list[Column]:
    """Return the columns of how a figure is spread over the clients."""
    return [
        _figures(heading, lambda row, name=name: row.clients[name], scale, digits, sign)  # type: ignore[misc]
        for name, (heading, scale, digits, sign) in headings(measure).items()
    ]


def _figures(heading: str, figure: Callable[[Row], Figure | None], scale: float, digits: int, sign: int) -> Column:
    """Return a column of figures whose best mean, as it is printed, is the largest (``sign`` 1) or the smallest (-1).

    A row of which some seeds lack the figure shows ``(2/3)``, and is not the best.

    :param sign: 0 for a column without a best mean.
    """

    def rank(row: Row) -> float | None:
        own = figure(row)
        return sign * round(scale * own.mean, digits) if own and sign and not _share(row, own) else None

    return Column(heading, lambda row: spread(figure(row), scale, digits) + _share(row, figure(row)), rank)


def _to_target(heading: str, figure: Callable[[Row], Figure | None], scale: float, digits: int) -> Column:
    """Return a column of the cost to reach the target."""
    column = _figures(heading, figure, scale, digits, -1)
    return replace(column, cell=lambda row: "not reached" if figure(row) is None else column.cell(row))


def _share(row: Row, figure: Figure | None) -> str:
    """Return the seeds that have a figure, if some lack it: `` (2/3)``."""
    return f" ({figure.n}/{len(row.values)})" if figure and figure.n < len(row.values) else ""


def _difference(difference: Difference | None, measure: Measure) -> str:
    if difference is None:
        return "-"
    text = difference.text(measure)
    return text if difference.low is not None else f"{text} ({counted(difference.n, 'seed')})"


def _p(difference: Difference | None) -> str:
    return "-" if difference is None or difference.corrected is None else p_text(difference.corrected)[2:].lstrip("= ")


def spread(figure: Figure | None, scale: float, digits: int = 2) -> str:
    """Return ``93.06 ± 0.41``, the mean alone for one value, a dash for none."""
    if figure is None:
        return "-"
    deviation = "" if figure.std is None else f" ± {scale * figure.std:.{digits}f}"
    return f"{scale * figure.mean:.{digits}f}{deviation}"


def caption(comparisons: Sequence[Comparison]) -> str:
    """Return the protocols and the main settings that all blocks have in common, in a line below a table."""
    names = ("plugins", "dataset", "model", "partition", "alpha", "clients", "participation", "rounds", "local_epochs")
    comparison = comparisons[0]
    models: Any = comparison.common.get("client_models")
    common = {**comparison.common, **({"model": joined(list(map(shown, models)))} if models else {})}
    parts = [f"{name} {_short(common[name])}" for name in names if name in common]
    after = "at the end" if comparison.round is None else f"after {comparison.round} rounds"
    under = joined([comparison.protocol for comparison in comparisons])
    return f"protocol{'s' * (len(comparisons) > 1)} {under}, {after}; {', '.join(parts)}"


def notes_of(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the notes of all protocols, without those that ask for a protocol which is there."""
    shown = tuple(f"--protocol {comparison.protocol}" for comparison in comparisons)
    return [
        note
        for note in dict.fromkeys(note for comparison in comparisons for note in comparison.notes)
        if not note.endswith(shown)
    ]


def as_markdown(comparisons: Sequence[Comparison], *, wide: bool = False) -> str:
    """Return GitHub tables; see :func:`printed`."""
    parts = []
    for table in printed(comparisons, wide=wide):
        parts.append(table.markdown())
        parts += ["\n".join(f"- {markdown_text(finding)}" for finding in table.findings)] if table.findings else []
    notes = [f"Note: {note}." for note in notes_of(comparisons)]
    below = [*ranks_in(comparisons), caption(comparisons), *notes]
    return "\n\n".join([*parts, *map(markdown_text, below)]) + "\n"


def ranks_in(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the ranks under each protocol that has some, in sentences."""
    return [
        f"{comparison.protocol}: {comparison.ranks}" if len(comparisons) > 1 else str(comparison.ranks)
        for comparison in comparisons
        if comparison.ranks is not None
    ]


def as_latex(
    comparisons: Sequence[Comparison], *, wide: bool = False, words: str = "", label: str = "tab:comparison"
) -> str:
    """Return tables in the style of the package booktabs, the best of each column in bold; see :func:`printed`.

    :param words: the caption; by default it is made of the settings.
    :param label: the label; with several tables each has its number behind it.
    """
    notes = [f"Note: {note}." for note in notes_of(comparisons)]
    head = map(latex_comment, (r"Needs \usepackage{booktabs}.", caption(comparisons), *notes))
    parts = ["\n".join(head)]
    tables = printed(comparisons, wide=wide, timed=False)
    for number, table in enumerate(tables, start=1):
        own = f"{label}-{number}" if len(tables) > 1 else label
        text = f"{words} ({table.title})" if words and table.title and len(tables) > 1 else words
        findings = map(latex_comment, table.findings)
        parts.append("\n".join([*findings, table.latex(text or _caption(table, caption(comparisons)), own)]))
    parts += map(latex_comment, ranks_in(comparisons))
    return "\n\n".join(parts) + "\n"


def _caption(table: Table, caption: str) -> str:
    """Return the caption of a table in a paper."""
    words = f"{table.title}; {caption}" if table.title else caption
    words = f"{words[0].upper()}{words[1:]}. Mean ± standard deviation over seeds; the best mean of a column is bold."
    if paired := [heading for heading in table.headings if heading.startswith(MINUS)]:
        words += (
            f" Differences to {paired[0].removeprefix(MINUS).rpartition(' [')[0]} are paired by seed, with Student's t "
            "interval; p-values of paired t-tests are corrected by Holm for all of this table."
        )
    return words


def best_rows(column: Column, rows: Sequence[Row]) -> list[int]:
    """Return the numbers of the rows that are best in a column, as it is printed.

    There is no best row if all are equal, or if the rows have different seeds.
    """
    if not same_seeds(rows):
        return []
    ranks = [column.rank(row) for row in rows]
    known = [rank for rank in ranks if rank is not None]
    if len(known) < 2 or min(known) == max(known):
        return []
    return [number for number, rank in enumerate(ranks) if rank == max(known)]


def plain_rows(comparison: Comparison) -> list[dict[str, Json]]:
    """Return one mapping per row with plain numbers: fractions, bytes, seconds. A missing number is None.

    It begins with the settings in which blocks differ.
    """
    shown = list(dict.fromkeys(name for block in comparison.blocks for name in block.settings))
    rows: list[dict[str, Json]] = []
    for block in comparison.blocks:
        for row in block.rows:
            values = {name: block.settings.get(name, "") for name in shown}
            values |= {"row": row.label, "protocol": comparison.protocol, "baseline": block.baseline}
            for name, figure in (
                (comparison.measure.name, row.summary),
                ("rounds", row.rounds),
                ("bytes", row.bytes),
                ("seconds", row.costs["s/round"]),
            ):
                values |= _parts(name, figure)
            d = row.difference
            values |= {f"difference_{part}": getattr(d, part) if d else None for part in ("mean", "low", "high")}
            values["difference_n"] = d.n if d else 0
            for name, figure in (
                ("virtual_seconds", row.virtual),
                *((f"clients_{n}", row.clients[n]) for n in FIGURES),
                *((f"client_{n}", row.each.get(n)) for n in client_names(comparison.blocks)),
                *((f"cost_{n}", row.costs[n]) for n in EACH[1:]),
                *row.reported.items(),
                *((f"metric_{n}", row.metrics.get(n)) for n in metric_names(comparison.blocks)),
            ):
                values |= _parts(name, figure)
            parts = {"p": "p", "p_holm": "corrected", "seeds_needed": "seeds"}
            values |= {name: getattr(d, part) if d else None for name, part in parts.items()}
            compared = block.baseline not in (None, row.label)
            values["verdict"] = (verdict(d, comparison.confidence, comparison.measure) or None) if compared else None
            rows.append(values)
    return rows


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Return one line per protocol and row. A missing value is empty."""
    return csv_of([row for comparison in comparisons for row in plain_rows(comparison)])


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Return everything: one comparison, or a list of several."""
    plain = list(map(asdict, comparisons))
    return json.dumps(plain[0] if len(plain) == 1 else plain, indent=2) + "\n"


FORMATS: dict[str, Callable[..., str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
    "json": as_json,
}


def _parts(name: str, figure: Figure | None) -> dict[str, Json]:
    mean, std, n = (figure.mean, figure.std, figure.n) if figure else (None, None, 0)
    return {f"{name}_mean": mean, f"{name}_std": std, f"{name}_n": n}


def _short(value: Json) -> str:
    """Return a setting's value for a caption: plugins without their options."""
    return method(value) if isinstance(value, dict) else shown(value)
