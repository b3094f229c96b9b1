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

_FITTING = r"\small\setlength{\tabcolsep}{4pt}\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""What a wide table begins with in LaTeX, so that it ends at the margin."""

_BETWEEN = 3
"""The blanks between two columns in a terminal."""


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
    groups: Sequence[tuple[str, int]] = ()
    """Headings above the columns, each with the number of columns that it spans; empty for no such line."""

    @property
    def whole_headings(self) -> list[str]:
        """The headings, each with the one above it: ``personal: accuracy %``."""
        above = [name for name, count in self.groups for _ in range(count)] or [""] * len(self.headings)
        return [f"{name}: {heading}" if name else heading for name, heading in zip(above, self.headings, strict=True)]

    def drawn(self, width: int) -> list[Drawn]:
        """Return the table for a terminal. Columns that do not fit side by side are in further tables below.

        No number is cut. Headings may take several lines, and so may names, in half of the width.
        """
        from rich import box
        from rich.cells import cell_len
        from rich.table import Table as Drawn

        heads = [heading.replace(": ", "\n", 1) if self.groups else heading for heading in self.whole_headings]
        needed = [
            max(map(cell_len, [*(row[place] for row in self.rows), *heads[place].split()]), default=0)
            for place in range(len(heads))
        ]
        names = min(needed[0], max(width // 2, len(heads[0])))
        parts: list[list[int]] = []
        left = 0
        for place in range(1, len(heads)):
            if not parts or needed[place] + _BETWEEN > left:
                parts.append([])
                left = width - names - 1
            parts[-1].append(place)
            left -= needed[place] + _BETWEEN
        made = []
        for number, places in enumerate(parts):
            table = Drawn(
                title=output.text(self.title) if self.title and not number else None,
                title_justify="left",
                title_style="bold not italic",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
            )
            table.add_column(output.text(heads[0]), overflow="fold")  # two names that are cut could look the same
            for place in places:
                table.add_column(output.text(heads[place]), justify="right", min_width=needed[place])
            for row in self.rows:
                table.add_row(*(output.text(row[place]) for place in (0, *places)))
            made.append(table)
        return made

    def markdown(self) -> str:
        """Return a GitHub table under its title."""
        lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (self.whole_headings, *self.rows)]
        lines.insert(1, "| --- |" + " ---: |" * (len(self.headings) - 1))
        return "\n".join([*([f"**{markdown_text(self.title)}**", ""] if self.title else []), *lines])

    def latex(self, caption: str = "", label: str = "") -> str:
        """Return a tabular in the style of the package booktabs, the best figures in bold.

        In a floating table it is as wide as the text at most: a wider one is made smaller (package graphicx).

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
        if self.groups:
            text = text.replace("\\toprule\n", f"\\toprule\n{self._latex_groups()}\n", 1)
        if caption:
            text = text.replace(r"\begin{tabular}", f"{_FITTING}\n\\begin{{tabular}}", 1)
            text = text.replace(r"\end{tabular}", r"\end{tabular}}", 1)
        comment = f"{latex_comment(self.title)}\n" if self.title and not caption else ""
        return comment + text.rstrip("\n")

    def _latex_groups(self) -> str:
        """Return the line of headings over several columns, with rules below them."""
        cells, rules, place = [], [], 1
        for name, count in self.groups:
            cells.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_text(name)}}}" if name else "& " * (count - 1))
            rules += [rf"\cmidrule(lr){{{place}-{place + count - 1}}}"] if name else []
            place += count
        return f"{' & '.join(cells)} \\\\\n{' '.join(rules)}"


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
