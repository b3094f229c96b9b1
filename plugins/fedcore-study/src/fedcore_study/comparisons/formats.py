"""A comparison as text: the cells of its tables, and Markdown, LaTeX, CSV and JSON.

Names may come from a stranger's run. Characters with a meaning to a terminal or in a format are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from fedcore.tools import Json, method
from fedcore_study.comparisons.comparison import Block, Comparison, Row, same_seeds
from fedcore_study.comparisons.fairness import FIGURES
from fedcore_study.comparisons.figures import Difference, Figure
from fedcore_study.comparisons.findings import verdict
from fedcore_study.comparisons.measures import Measure, direction
from fedcore_study.comparisons.significance import p_text
from fedcore_study.tables import Table, csv_of, latex_comment, markdown_text
from fedcore_study.words import counted, named, shown


@dataclass(frozen=True)
class Column:
    """A column of a block's table."""

    heading: str
    cell: Callable[[Row], str]
    """A row's text."""
    rank: Callable[[Row], float | None] = lambda row: None
    """A number that is largest for the best row; None for a row that cannot be the best."""


SECONDS = "s/round"


def table_columns(comparison: Comparison, block: Block) -> list[Column]:
    """Return the columns of a block; the first one holds names, the others numbers."""
    found = [
        Column(comparison.heading, lambda row: row.label),
        Column("seeds", lambda row: str(len(row.values))),
        _measured(comparison),
        *(
            _figures(name, lambda row, name=name: row.metrics.get(name), 1, 4, direction(name))  # type: ignore[misc]
            for name in metric_names([block])
        ),
    ]
    for name in comparison.reported:
        found.append(_figures(name, lambda row, name=name: row.reported[name], 1, 4, 0))  # type: ignore[misc]
    if comparison.by_client:  # with differences and costs there would be too many columns to read
        return [*found, *client_columns()]
    if block.baseline is not None:
        interval = f"[{100 * comparison.confidence:g} % interval]"
        found.append(
            Column(f"minus {block.baseline} {interval}", lambda row: _difference(row.difference, comparison.measure))
        )
        if any(row.difference is not None and row.difference.corrected is not None for row in block.rows):
            found.append(Column("p (Holm)", lambda row: _p(row.difference)))
    if comparison.target is not None:
        goal = f"{100 * comparison.target:g} %"
        found.append(_to_target(f"rounds to {goal}", lambda row: row.rounds, 1.0, 1))
        found.append(_to_target(f"MB to {goal}", lambda row: row.bytes, 1e-6, 2))
        if any(row.virtual for row in block.rows):
            found.append(_to_target(f"virtual s to {goal}", lambda row: row.virtual, 1.0, 1))
    return [*found, _figures(SECONDS, lambda row: row.seconds, 1, 3, 0)]


def printed(comparison: Comparison, *, wide: bool = False, timed: bool = True) -> list[Table]:
    """Return the tables of a comparison: one per block, or with ``wide`` one with a column per block.

    :param timed: with the column of seconds, which depend on the machine.
    """
    if wide:
        return [_wide(comparison)]
    found = []
    for block in comparison.blocks:
        shown = [column for column in table_columns(comparison, block) if timed or column.heading != SECONDS]
        rows = [[column.cell(row) for column in shown] for row in block.rows]
        best = [(number, place) for place, column in enumerate(shown) for number in best_rows(column, block.rows)]
        found.append(Table(named(block.settings), [column.heading for column in shown], rows, best, block.findings))
    return found


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
            f"{named(block.settings)}: {said}" if named(block.settings) else said
            for block in blocks
            for said in block.findings
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


def client_columns() -> list[Column]:
    """Return the columns of how the accuracy is spread over the clients."""
    return [
        _figures(heading, lambda row, name=name: row.clients[name], scale, digits, sign)  # type: ignore[misc]
        for name, (heading, scale, digits, sign) in FIGURES.items()
    ]


def _figures(heading: str, figure: Callable[[Row], Figure | None], scale: float, digits: int, sign: int) -> Column:
    """Return a column of figures whose best mean, as it is printed, is the largest (``sign`` 1) or the smallest (-1).

    A row of which some seeds lack the figure shows ``(2/3)``, and is not the best.

    :param sign: 0 for a column without a best mean.
    """

    def rank(row: Row) -> float | None:
        found = figure(row)
        return sign * round(scale * found.mean, digits) if found and sign and not _share(row, found) else None

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


def caption(comparison: Comparison) -> str:
    """Return the protocol and the main settings that all blocks have in common, in a line below a table."""
    names = ("plugins", "dataset", "model", "partition", "alpha", "clients", "participation", "rounds", "local_epochs")
    common = comparison.common
    parts = [f"{name} {_short(common[name])}" for name in names if name in common]
    after = "at the end" if comparison.round is None else f"after {comparison.round} rounds"
    return f"protocol {comparison.protocol}, {after}; {', '.join(parts)}"


def as_markdown(comparison: Comparison, *, wide: bool = False) -> str:
    """Return GitHub tables; see :func:`printed`."""
    parts = []
    for table in printed(comparison, wide=wide):
        parts.append(table.markdown())
        parts += ["\n".join(f"- {markdown_text(said)}" for said in table.findings)] if table.findings else []
    ranks = [str(comparison.ranks)] if comparison.ranks else []
    notes = [f"Note: {note}." for note in comparison.notes]
    return "\n\n".join([*parts, *map(markdown_text, (*ranks, caption(comparison), *notes))]) + "\n"


def as_latex(comparison: Comparison, *, wide: bool = False) -> str:
    """Return tables in the style of the package booktabs, the best of each column in bold; see :func:`printed`."""
    notes = [f"Note: {note}." for note in comparison.notes]
    said = map(latex_comment, (r"Needs \usepackage{booktabs}.", caption(comparison), *notes))
    parts = ["\n".join(said)]
    tables = printed(comparison, wide=wide, timed=False)
    for number, table in enumerate(tables, start=1):
        label = f"tab:comparison-{number}" if len(tables) > 1 else "tab:comparison"
        paired = None if wide or comparison.by_client else comparison.blocks[number - 1].baseline
        said = map(latex_comment, table.findings)
        parts.append("\n".join([*said, table.latex(_caption(table, caption(comparison), paired), label)]))
    if comparison.ranks:
        parts.append(latex_comment(str(comparison.ranks)))
    return "\n\n".join(parts) + "\n"


def _caption(table: Table, caption: str, paired: str | None) -> str:
    """Return what a table of a paper says below or above it.

    :param paired: the baseline of the differences; None for a table without differences.
    """
    words = f"{table.title}; {caption}" if table.title else caption
    words = f"{words[0].upper()}{words[1:]}. Mean ± standard deviation over seeds; the best mean of a column is bold."
    if paired is not None:
        words += (
            f" Differences to {paired} are paired by seed, with Student's t interval; p-values of paired "
            "t-tests are corrected by Holm for all of this table."
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
    found = []
    for block in comparison.blocks:
        for row in block.rows:
            values = {name: block.settings.get(name, "") for name in shown}
            values |= {"row": row.label, "protocol": comparison.protocol, "baseline": block.baseline}
            for name, figure in (
                (comparison.measure.name, row.summary),
                ("rounds", row.rounds),
                ("bytes", row.bytes),
                ("seconds", row.seconds),
            ):
                values |= _parts(name, figure)
            d = row.difference
            values |= {f"difference_{part}": getattr(d, part) if d else None for part in ("mean", "low", "high")}
            values["difference_n"] = d.n if d else 0
            for name, figure in (
                ("virtual_seconds", row.virtual),
                *((f"clients_{n}", row.clients[n]) for n in FIGURES),
                *row.reported.items(),
                *((f"metric_{n}", row.metrics.get(n)) for n in metric_names(comparison.blocks)),
            ):
                values |= _parts(name, figure)
            parts = {"p": "p", "p_holm": "corrected", "seeds_needed": "seeds"}
            values |= {name: getattr(d, part) if d else None for name, part in parts.items()}
            compared = block.baseline not in (None, row.label)
            values["verdict"] = (verdict(d, comparison.confidence, comparison.measure) or None) if compared else None
            found.append(values)
    return found


def as_csv(comparison: Comparison) -> str:
    """Return one line per row. A missing value is empty."""
    return csv_of(plain_rows(comparison))


def as_json(comparison: Comparison) -> str:
    """Return everything."""
    return json.dumps(asdict(comparison), indent=2) + "\n"


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
