"""A reproduced table as text: blocks of cells for all forms, and Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any

from fedcore_reproduce.claims import sentences
from fedcore_reproduce.run import Reproduction, ResultCell
from fedcore_study.tools import Table, counted, csv_text, latex_comment, markdown_text, spread

PAPERS = ("paper %", "minus paper")
"""The headings of columns with the paper's numbers."""


def blocks(reproduction: Reproduction) -> list[Table]:
    """Return a block for each column: the paper's figure, ours and the difference in points, or why it is missing.

    If none of a column's cells was run, and all for the same reason, the block's title has the reason.
    """
    recipe = reproduction.recipe
    ours = [text for heading in recipe.protocols for text in (f"{heading} %", "minus paper")]
    headings = ["method", "paper %", *ours]
    # Most papers' figures print no numbers: then there is nothing to stand beside ours.
    kept = [place for place, each in enumerate(headings) if recipe.prints_numbers or each not in PAPERS]
    tables = []
    for name, cells in reproduction.columns().items():
        reasons = {cell.reason for cell in cells}
        common = reasons.pop() if len(reasons) == 1 and not any(cell.ours for cell in cells) else ""
        rows = [[cell.row, cell.paper.text, *_ours(reproduction, cell, common)] for cell in cells]
        shown = [[row[place] for place in kept] for row in rows]
        tables.append(Table(f"{name}: {common}" if common else name, [headings[place] for place in kept], shown))
    return tables


def _ours(reproduction: Reproduction, cell: ResultCell, common: str) -> list[str]:
    texts = []
    for heading in reproduction.recipe.protocols:
        ours = cell.ours.get(heading)
        if ours is None or ours.figure is None:
            texts += ["-", "-"]
            continue
        short = f" ({cell.seeds}/{cell.planned} seeds)" if cell.seeds < cell.planned else ""
        texts.append(spread(ours.figure, 100) + short)
        texts.append("-" if ours.difference is None else f"{ours.difference:+.2f}")
    if not cell.ours:
        texts[0] = common.partition(":")[0] if common else textwrap.shorten(cell.reason, 120, placeholder=" ...")
    return texts


def title(reproduction: Reproduction) -> str:
    """Return the line above a table: the method, the paper and the table."""
    recipe = reproduction.recipe
    return f"{recipe.label} of {recipe.source}: {recipe.title}"


def caption(reproduction: Reproduction) -> list[str]:
    """Return the lines below a table: the scale, the protocols, the shown rows and columns, the recipe's notes."""
    recipe = reproduction.recipe
    seeds = max((cell.planned for cell in reproduction.cells), default=0)
    number = counted(seeds, "seed")
    if reproduction.scale == "quick":
        lines = [f"Scale quick, {number}; no figures to compare with the paper's as such. {recipe.quick.says}"]
    else:
        lines = [f"Scale paper, {number}."]
    used: dict[str, dict[str, None]] = {heading: {} for heading in recipe.protocols}
    for cell in reproduction.cells:
        for heading, ours in cell.ours.items():
            if ours.protocol:
                used[heading][ours.protocol] = None
    protocols = [f"{heading}: protocol {', '.join(names)}" for heading, names in used.items() if names]
    if protocols:
        lines.append("; ".join(protocols) + ".")
    chosen = _selection(reproduction)
    if chosen:
        lines.append(chosen)
    return [*lines, *_claims(reproduction), *recipe.notes]


def _claims(reproduction: Reproduction) -> list[str]:
    values = {(cell.row, cell.column): cell.values for cell in reproduction.cells}
    return sentences(reproduction.recipe, values)


def _selection(reproduction: Reproduction) -> str:
    """Return how many rows and columns of the paper's table are shown; empty if all are."""
    recipe = reproduction.recipe
    rows = {cell.row for cell in reproduction.cells}
    parts = []
    if len(rows) < len(recipe.rows):
        parts.append(f"{len(rows)} of the {len(recipe.rows)} rows")
    if len(reproduction.columns()) < len(recipe.columns):
        parts.append(f"{len(reproduction.columns())} of the {len(recipe.columns)} columns")
    return f"Shown: {' and '.join(parts)} of the paper's table." if parts else ""


def markdown(reproduction: Reproduction) -> str:
    """Return a GitHub table for each column of the paper's."""
    tables = [block.markdown() for block in blocks(reproduction)]
    notes = "\n".join(f"- {markdown_text(line)}" for line in caption(reproduction))
    return "\n\n".join([markdown_text(title(reproduction)), *tables, notes]) + "\n"


def latex(reproduction: Reproduction) -> str:
    """Return a tabular for each column of the paper's table, in the style of the package booktabs."""
    tables = [block.latex() for block in blocks(reproduction)]
    notes = "\n".join(map(latex_comment, (title(reproduction), *caption(reproduction))))
    return "\n\n".join([notes, *tables]) + "\n"


def as_csv(reproduction: Reproduction) -> str:
    """Return one line per cell and heading, with figures in percent. Missing figures are empty."""
    named = ["column", "row", "paper", "paper_mean", "paper_std", "ours", "protocol"]
    rows: list[list[Any]] = [[*named, "mean", "std", "n", "planned", "difference", "reason"]]
    for cell in reproduction.cells:
        paper = [cell.paper.text, cell.paper.mean, cell.paper.std]
        for heading in reproduction.recipe.protocols:
            ours = _plain(cell, heading)
            figures = [ours["mean"], ours["std"], ours["n"], cell.planned, ours["difference"]]
            rows.append([cell.column, cell.row, *paper, heading, ours["protocol"], *figures, cell.reason])
    return csv_text(rows)


def as_json(reproduction: Reproduction) -> str:
    """Return everything, figures in percent."""
    recipe = reproduction.recipe
    content = {
        "method": recipe.method,
        recipe.kind: recipe.number,
        "title": recipe.title,
        "source": recipe.source,
        "scale": reproduction.scale,
        "scaled": recipe.quick.says if reproduction.scale == "quick" else None,
        "claims": _claims(reproduction),
        "notes": recipe.notes,
        "sweep_dir": str(reproduction.directory),
        "cells": [
            {
                "column": cell.column,
                "row": cell.row,
                "paper": cell.paper.model_dump(),
                "ours": {heading: _plain(cell, heading) for heading in cell.ours},
                "seeds": cell.seeds,
                "planned": cell.planned,
                "reason": cell.reason or None,
            }
            for cell in reproduction.cells
        ],
    }
    return json.dumps(content, indent=2) + "\n"


FORMATS: dict[str, Callable[[Reproduction], str]] = {
    "markdown": markdown,
    "csv": as_csv,
    "latex": latex,
    "json": as_json,
}


def _plain(cell: ResultCell, heading: str) -> dict[str, Any]:
    ours = cell.ours.get(heading)
    figure = ours.figure if ours else None
    return {
        "protocol": ours.protocol if ours else None,
        "mean": 100 * figure.mean if figure else None,
        "std": 100 * figure.std if figure and figure.std is not None else None,
        "n": figure.n if figure else 0,
        "difference": ours.difference if ours else None,
    }
