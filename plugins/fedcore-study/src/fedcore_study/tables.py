"""Tables as text: for a terminal, Markdown, LaTeX, CSV.

Names may come from a stranger's run. Characters with a meaning to a terminal or in a format are escaped.
"""

from __future__ import annotations

import csv
import io
import itertools
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
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$", "|": "$|$"}
)

_SMALL = r"\small\setlength{\tabcolsep}{4pt}"
"""How a table of a paper is set: in letters of 9 pt, with 4 pt on both sides of each column."""

_LINE = 345.0
"""The width of a line of text in pt, of LaTeX's article in letters of 10 pt. The lines of most papers are wider."""

_NAMES = 0.4
"""The largest part of a line for the names of rows. Longer ones take several lines."""

_WIDTHS = {
    **dict.fromkeys("fijlrstI ()[]!',.:;`", 0.41),
    **dict.fromkeys("0123456789acegkoqvxyz/*", 0.54),
    **dict.fromkeys("bdhnpu", 0.58),
    **dict.fromkeys("-+=<>±ABCDEFGHJKLNOPQRSTUVXYZ&@", 0.82),
}
"""The width of a character in LaTeX's font Computer Modern of 9 pt, in em and rounded up; others take 1.07."""

_BOLD = 1.16
"""The width of bold text relative to other text."""

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
        above = zip(self._above, self.headings, strict=True)
        return [f"{name}: {heading}" if name else heading for name, heading in above]

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
        parts = _side_by_side([wide + _BETWEEN for wide in needed[1:]], width - names - 1)
        tables = []
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
            tables.append(table)
        return tables

    def markdown(self) -> str:
        """Return a GitHub table under its title."""
        lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (self.whole_headings, *self.rows)]
        lines.insert(1, "| --- |" + " ---: |" * (len(self.headings) - 1))
        return "\n".join([*([f"**{markdown_text(self.title)}**", ""] if self.title else []), *lines])

    def latex(self, caption: str = "", label: str = "") -> str:
        """Return a tabular in the style of the package booktabs, the best figures in bold.

        Columns that do not fit side by side into a line of text are in further tabulars below.

        :param caption: of a floating table around it. Without one, the title is a comment.
        """
        parts = "\n\n\\medskip\n".join(self._tabular(places) for places in self._latex_parts())
        if caption:
            named = [rf"\label{{{label}}}"] if label else []
            head = [r"\begin{table}[t]", r"\centering", rf"\caption{{{latex_text(caption)}}}", *named, _SMALL]
            return "\n".join([*head, parts, r"\end{table}"])
        head = [latex_comment(self.title)] if self.title else []
        return "\n".join([*head, f"{{{_SMALL}\n{parts}\n\n}}"])

    def _latex_parts(self) -> list[list[int]]:
        """Return the columns of each tabular, each with the first column."""
        best = set(self.best)
        cells = [
            max((_width(row[place], (number, place) in best) for number, row in enumerate(self.rows)), default=0)
            for place in range(len(self.headings))
        ]
        heads = [max(map(_width, _lines_of(heading, cells[k]))) for k, heading in enumerate(self.headings)]
        needed = [max(widths) + 8 for widths in zip(cells, heads, map(_width, self._above), strict=True)]
        return _side_by_side(needed[1:], _LINE - min(needed[0], _NAMES * _LINE + 8))

    @property
    def _above(self) -> list[str]:
        """The heading above each column; empty for none."""
        return [name for name, count in self.groups for _ in range(count)] or [""] * len(self.headings)

    def _tabular(self, places: Sequence[int]) -> str:
        """Return the first column and some others as a tabular."""
        best = set(self.best)
        cells = [max((_width(row[place]) for row in self.rows), default=0) for place in range(len(self.headings))]
        names = rf"p{{{_NAMES}\linewidth}}" if cells[0] > _NAMES * _LINE else "l"
        lines = [rf"\begin{{tabular}}{{{names}{'r' * len(places)}}}", r"\toprule"]
        if any(self._above[place] for place in places):
            lines += self._latex_groups([0, *places])
        heads = []
        for place in (0, *places):
            stack = r"\\".join(map(latex_text, _lines_of(self.headings[place], cells[place])))
            heads.append(rf"\shortstack[r]{{{stack}}}" if r"\\" in stack else stack)
        lines += [rf"{' & '.join(heads)} \\", r"\midrule"]
        for number, row in enumerate(self.rows):
            texts = [latex_text(row[0]), *(_latex_number(row[place]) for place in places)]
            bold = [(number, place) in best for place in (0, *places)]
            shown = (rf"\textbf{{{text}}}" if is_best else text for text, is_best in zip(texts, bold, strict=True))
            lines.append(rf"{' & '.join(shown)} \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def _latex_groups(self, places: Sequence[int]) -> list[str]:
        """Return the line of headings over several of these columns, and the rules below them."""
        cells, rules, place = [], [], 1
        for name, columns in itertools.groupby(self._above[place] for place in places):
            count = len(list(columns))
            cells.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_text(name)}}}" if name else "& " * (count - 1))
            rules += [rf"\cmidrule(lr){{{place}-{place + count - 1}}}"] if name else []
            place += count
        return [rf"{' & '.join(cells)} \\", " ".join(rules)]


def _side_by_side(needed: Sequence[float], room: float) -> list[list[int]]:
    """Return the columns of each part of a table next to its first column, numbered from 1.

    :param needed: their widths.
    :param room: the width of a part without the first column.
    """
    parts: list[list[int]] = []
    left = 0.0
    for place, width in enumerate(needed, start=1):
        if not parts or width > left:
            parts.append([])
            left = room
        parts[-1].append(place)
        left -= width
    return parts or [[]]


def _width(text: str, bold: bool = False) -> float:
    """Return about the width of a text in pt, in Computer Modern of 9 pt."""
    return 9 * (_BOLD if bold else 1) * sum(_WIDTHS.get(character, 1.07) for character in text)


def _lines_of(heading: str, room: float) -> list[str]:
    """Return a heading in lines that are no wider than the room, or than their only word."""
    lines: list[str] = []
    for word in heading.split():
        if lines and _width(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


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
    """Return a text in which LaTeX finds no command, and no option of the end of a row before it."""
    written = _line(text).translate(_LATEX)
    return f"{{}}{written}" if written.startswith(("[", "*")) else written


def latex_comment(text: str) -> str:
    """Return a text as a comment of LaTeX."""
    return f"% {_line(text)}"


def _latex_number(text: str) -> str:
    """Return a cell of numbers for LaTeX, with minus signs instead of hyphens."""
    return re.sub(r"-(?=\d)", "$-$", latex_text(text))


def _line(text: str) -> str:
    return " ".join(output.clean(text).split())
