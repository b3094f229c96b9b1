"""A report as a parser reads it: its tables, its figures with their marks, and what is folded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class Element:
    """An element with its children; texts are children, too."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str = "", kind: str = "") -> list[Element]:
        """Return the elements inside of a tag and with a class, in their order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if (not tag or child.tag == tag) and (
                    not kind or kind in (child.attributes.get("class") or "").split()
                ):
                    found.append(child)
                found += child.all(tag, kind)
        return found

    def text(self) -> str:
        """Return all text inside, without titles, scripts and styles."""
        parts = [
            child if isinstance(child, str) else child.text()
            for child in self.children
            if isinstance(child, str) or child.tag not in ("title", "script", "style")
        ]
        return " ".join(" ".join(parts).split())

    def said(self) -> list[str]:
        """Return the titles inside, which the page shows for marks."""
        return ["".join(map(str, title.children)) for title in self.all("title")]

    def number(self, name: str) -> float:
        """Return an attribute as a number."""
        return float(self.attributes[name] or "")


class Page(HTMLParser):
    """A report; a tag that is not closed in its order fails the test."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.root = Element("")
        self._open = [self.root]
        self.feed(self.source)
        self.close()
        assert self._open == [self.root]
        self.text = self.root.text()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    @property
    def figures(self) -> dict[str, Element]:
        """The figures by their title, of the first section that has one of this title."""
        found: dict[str, Element] = {}
        for figure in self.root.all("figure"):
            found.setdefault(figure.all("h4")[0].text(), figure)
        return found

    def table(self, number: int = 0) -> list[list[str]]:
        """Return the cells of a table, its headings first."""
        rows = self.root.all("table")[number].all("tr")
        return [[cell.text() for cell in row.children if isinstance(cell, Element)] for row in rows]


def values(figure: Element) -> dict[str, dict[float, float]]:
    """Return the values that a line chart over rounds shows, by its lines and rounds."""
    found: dict[str, dict[float, float]] = {}
    for strip in figure.all("g", "strip"):
        first, *lines = strip.said()[0].split("\n")
        for line in lines:
            label, _, value = line.rpartition(": ")
            found.setdefault(label, {})[float(first.removeprefix("round "))] = float(value.split(" ± ")[0])
    return found


def drawing(path: str | None) -> list[Any]:
    """Return the numbers in the drawing of a path."""
    return [float(number) for number in re.findall(r"-?[\d.]+", path or "")]
