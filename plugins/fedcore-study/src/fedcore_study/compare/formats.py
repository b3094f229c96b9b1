"""A comparison as text: the cells that every table shows, and markdown, LaTeX, CSV and JSON of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence

from fedcore.base.config import Json
from fedcore.base.identity import method
from fedcore_study.compare.cautions import FEW
from fedcore_study.compare.comparison import Block, Comparison, Row
from fedcore_study.compare.figures import Figure

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {character: "\\" + character for character in "&%$#_{}"} | {"±": r"$\pm$"}


def headings(comparison: Comparison, block: Block) -> list[str]:
    """Return the columns' headings of a block; the first column holds names, the others numbers."""
    found = [", ".join("method" if name == "plugin" else name for name in comparison.by), "seeds", "accuracy %"]
    if block.baseline is not None:
        found.append(f"minus {block.baseline} [{100 * comparison.confidence:g} % interval]")
    if comparison.target is not None:
        goal = f"{100 * comparison.target:g} %"
        found += [f"rounds to {goal}", f"MB to {goal}"]
    return [*found, "s/round"]


def cells(comparison: Comparison, block: Block, row: Row) -> list[str]:
    """Return a row's cells, accuracies in percent: mean ± standard deviation, ``(2/3)`` where not all seeds have it."""
    seeds = len(row.accuracy)
    found = [row.label, str(seeds), spread(row.summary, 100)]
    if block.baseline is not None:
        difference = row.difference
        text = "-"
        if difference is not None:
            text = f"{100 * difference.mean:+.2f}"
            if difference.n < FEW:
                text += f" ({difference.n} seed{'s' if difference.n > 1 else ''})"
            elif difference.low is not None and difference.high is not None:
                text += f" [{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"
        found.append(text)
    if comparison.target is not None:
        for figure, scale, digits in ((row.rounds, 1.0, 1), (row.bytes, 1e-6, 2)):
            short = f" ({figure.n}/{seeds})" if figure is not None and figure.n < seeds else ""
            found.append(spread(figure, scale, digits) + short if figure else "not reached")
    return [*found, spread(row.seconds, 1, 3)]


def spread(figure: Figure | None, scale: float, digits: int = 2) -> str:
    """Return ``93.06 ± 0.41``, the mean alone for one value, a dash for none."""
    if figure is None:
        return "-"
    deviation = "" if figure.std is None else f" ± {scale * figure.std:.{digits}f}"
    return f"{scale * figure.mean:.{digits}f}{deviation}"


def title(block: Block) -> str:
    """Return in what a block differs from the others; empty for the only one."""
    return ", ".join(f"{name} {_short(name, value)}" for name, value in block.settings.items())


def caption(comparison: Comparison) -> str:
    """Return what all blocks have in common, as far as one wants to read it under a table."""
    names = ("plugins", "dataset", "model", "partition", "alpha", "clients", "participation", "rounds", "local_epochs")
    common = comparison.common
    parts = [f"{name} {_short(name, common[name])}" for name in names if name in common]
    after = "at the end" if comparison.round is None else f"after {comparison.round} rounds"
    return f"protocol {comparison.protocol}, {after}; {', '.join(parts)}"


def markdown(comparison: Comparison) -> str:
    """Return a GitHub table for each block."""
    parts = []
    for block in comparison.blocks:
        rows = [cells(comparison, block, row) for row in block.rows]
        parts.append(markdown_table(title(block), headings(comparison, block), rows))
    notes = [f"Note: {note}." for note in comparison.notes]
    return "\n\n".join([*parts, caption(comparison), *notes]) + "\n"


def latex(comparison: Comparison) -> str:
    """Return a tabular for each block, in the style of the package booktabs."""
    parts = []
    for block in comparison.blocks:
        rows = [cells(comparison, block, row) for row in block.rows]
        parts.append(latex_table(title(block), headings(comparison, block), rows))
    notes = [f"% Note: {note}." for note in comparison.notes]
    return "\n\n".join(["\n".join([f"% {caption(comparison)}", *notes]), *parts]) + "\n"


def markdown_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a GitHub table under its title, if it has one; the first column holds names, the others numbers."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (headings, *rows)]
    lines.insert(1, "| --- |" + " ---: |" * (len(headings) - 1))
    return "\n".join([*([f"**{title}**", ""] if title else []), *lines])


def latex_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a tabular with its title as a comment; the first column holds names, the others numbers."""
    lines = [f"% {title}"] if title else []
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule", _latex_row(headings), r"\midrule"]
    return "\n".join([*lines, *map(_latex_row, rows), r"\bottomrule", r"\end{tabular}"])


def as_csv(comparison: Comparison) -> str:
    """Return one line per row with plain numbers: fractions, bytes, seconds; empty where there is none."""
    file = io.StringIO()
    named = list(dict.fromkeys(name for block in comparison.blocks for name in block.settings))
    writer = csv.writer(file, lineterminator="\n")
    figures = [f"{name}_{part}" for name in ("accuracy", "rounds", "bytes", "seconds") for part in ("mean", "std", "n")]
    difference = ["difference_mean", "difference_low", "difference_high", "difference_n"]
    writer.writerow([*named, "row", "protocol", "baseline", *figures, *difference])
    for block in comparison.blocks:
        for row in block.rows:
            values: list[Json] = [_short(name, block.settings.get(name, "")) for name in named]
            values += [row.label, comparison.protocol, block.baseline]
            for figure in (row.summary, row.rounds, row.bytes, row.seconds):
                values += [figure.mean, figure.std, figure.n] if figure else [None, None, 0]
            d = row.difference
            values += [d.mean, d.low, d.high, d.n] if d else [None, None, None, 0]
            writer.writerow(values)
    return file.getvalue()


def as_json(comparison: Comparison) -> str:
    """Return everything."""
    return json.dumps(comparison.as_json(), indent=2) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "markdown": markdown,
    "csv": as_csv,
    "latex": latex,
    "json": as_json,
}


def _latex_row(row: Sequence[str]) -> str:
    return " & ".join("".join(_LATEX.get(c, c) for c in cell) for cell in row) + r" \\"


def _short(name: str, value: Json) -> Json:
    return method(value) if name == "plugins" and isinstance(value, dict) else value
