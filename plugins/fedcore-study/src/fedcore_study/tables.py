"""Tables as text: for a terminal, Markdown, LaTeX, CSV.

Names may come from a stranger's run. Characters with a meaning to a terminal or in a format are escaped.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedcore.tools import Json, output

if TYPE_CHECKING:
    from rich.table import Table as Drawn

_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {character: "\\" + character for character in "&%$#_{}"}
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
)


@dataclass(frozen=True)
class Table:
    """A table of texts. The first column holds names, the others numbers."""

    title: str
    """Empty for a table without one."""
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[tuple[int, int]] = ()
    """The places of the best figures: row and column."""
    findings: list[str] = field(default_factory=list)

    def drawn(self) -> Drawn:
        """Return the table for a terminal."""
        from rich import box
        from rich.table import Table as Drawn

        table = Drawn(
            title=output.text(self.title) if self.title else None,
            title_justify="left",
            title_style="bold not italic",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for index, heading in enumerate(self.headings):
            table.add_column(output.text(heading), justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*map(output.text, row))
        return table

    def markdown(self) -> str:
        """Return a GitHub table under its title."""
        lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (self.headings, *self.rows)]
        lines.insert(1, "| --- |" + " ---: |" * (len(self.headings) - 1))
        return "\n".join([*([f"**{markdown_text(self.title)}**", ""] if self.title else []), *lines])

    def latex(self, caption: str = "", label: str = "") -> str:
        """Return a tabular in the style of the package booktabs, the best figures in bold.

        :param caption: of a floating table around it. Without one, the title is a comment.
        """
        import pandas  # here: it takes half a second

        rows = [[latex_text(name), *map(_latex_number, cells)] for name, *cells in self.rows]
        for row, place in self.best:
            rows[row][place] = rf"\textbf{{{rows[row][place]}}}"
        columns = range(len(self.headings))
        style = pandas.DataFrame(rows, columns=columns).style.hide(axis="index")
        text: str = style.relabel_index([*map(latex_text, self.headings)], axis="columns").to_latex(
            column_format="l" + "r" * (len(columns) - 1),
            hrules=True,
            caption=latex_text(caption) or None,
            label=label or None,
            position="t" if caption else None,
            position_float="centering" if caption else None,
        )
        comment = f"{latex_comment(self.title)}\n" if self.title and not caption else ""
        return comment + text.rstrip("\n")


def csv_text(rows: Iterable[Sequence[Json]]) -> str:
    """Return rows as CSV in which a spreadsheet finds no formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        cells = (_line(cell) if isinstance(cell, str) else cell for cell in row)
        writer.writerow([f"'{cell}" if isinstance(cell, str) and re.match("[=+@-].", cell) else cell for cell in cells])
    return file.getvalue()


def csv_of(rows: Sequence[Mapping[str, Json]]) -> str:
    """Return plain rows as CSV, with the columns that any of them has."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([heads, *([row.get(name) for name in heads] for row in rows)])


def markdown_text(text: str) -> str:
    """Return a text that has no meaning in Markdown: no HTML, no link, no end of a table's cell."""
    return re.sub(r"[\\|]", r"\\\g<0>", _line(text)).replace("<", "&lt;").replace("](", r"]\(")


def latex_text(text: str) -> str:
    """Return a text in which LaTeX finds no command."""
    return _line(text).translate(_LATEX)


def latex_comment(text: str) -> str:
    """Return a text as a comment of LaTeX."""
    return f"% {_line(text)}"


def _latex_number(text: str) -> str:
    """Return a cell of numbers for LaTeX, with minus signs instead of hyphens."""
    return re.sub(r"-(?=\d)", "$-$", latex_text(text))


def _line(text: str) -> str:
    return " ".join(output.clean(text).split())
