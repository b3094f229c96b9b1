"""The picture of the core's floors, drawn from its imports whenever the site is built."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from links import ROOT

MARK = "<!-- floors -->"
"""Stands in a page where the picture goes."""

ROW, GAP, BOX, LEFT, WIDTH = 34, 8, 660, 10, 860


class Imports(NamedTuple):
    """Imports between the floors of a package.

    :param modules: the number of modules, by floor.
    :param counts: the number of import statements, by (importing floor, imported floor).
    """

    modules: dict[str, int]
    counts: Counter[tuple[str, str]]


def layers(project: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """Return the floors of the contract that import-linter checks, top first; floors side by side share a list."""
    contracts = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in found]


def read(package: Path, floors: Sequence[str]) -> Imports:
    """Count the imports between floors in a package's sources, without those for types alone."""
    modules: dict[str, int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for floor in floors:
        files = sorted((package / floor).rglob("*.py"))
        modules[floor] = len(files)
        for file in files:
            for target in _imported(file.read_text(encoding="utf-8"), package.name):
                if target in floors and target != floor:
                    counts[floor, target] += 1
    return Imports(modules, counts)


def _imported(source: str, package: str) -> list[str]:
    """Return the floors that a module imports from, one entry per statement."""
    found = []
    tree = ast.parse(source)
    types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            paths = [name.name for name in node.names]
        else:
            continue
        found += sorted({path.split(".")[1] for path in paths if path.startswith(f"{package}.")})
    return found


def upward(imports: Imports, order: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return the pairs of floors in which the first imports from a floor beside or above it."""
    level = {name: number for number, names in enumerate(order) for name in names}
    return [(above, below) for above, below in imports.counts if level[above] >= level[below]]


def purpose(package: Path, floor: str) -> str:
    """Return what a floor's ``__init__.py`` says of it in its first line."""
    text = (package / floor / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def picture(package: Path = ROOT / "fedcore") -> str:
    """Return the floors as SVG: a box each, an arc from a floor to each floor that it imports, upward ones in red."""
    order = layers()
    floors = [name for names in order for name in names]
    imports = read(package, floors)
    wrong = set(upward(imports, order))
    middle: dict[str, int] = {}
    boxes, y = [], 4
    for names in order:
        for name in names:
            middle[name] = y + ROW // 2
            text = y + ROW // 2 + 5
            boxes.append(
                f'<rect x="{LEFT}" y="{y}" width="{BOX}" height="{ROW}" rx="4" fill="none" stroke="currentColor"/>'
                f'<text x="{LEFT + 10}" y="{text}" font-weight="bold">{name}/</text>'
                f'<text x="{LEFT + 105}" y="{text}" font-size="12">{escape(_short(purpose(package, name)))}</text>'
            )
            y += ROW + (0 if name != names[-1] else GAP)
    arcs = []
    for (above, below), count in sorted(imports.counts.items()):
        start, end = middle[above], middle[below]
        reach = BOX + LEFT + 20 + abs(end - start) * 0.4
        colour, kind = ("#d32f2f", "upward") if (above, below) in wrong else ("currentColor", "downward")
        arcs.append(
            f'<path class="{kind}" d="M{BOX + LEFT} {start} C{reach:.0f} {start} {reach:.0f} {end} {BOX + LEFT} {end}" '
            f'fill="none" stroke="{colour}" stroke-opacity="0.6" stroke-width="{0.6 + min(count, 40) / 12:.1f}">'
            f"<title>{above} imports from {below}: {count}</title></path>"
        )
    caption = (
        f"{sum(imports.modules.values())} modules, {sum(imports.counts.values())} imports between floors, "
        f"{sum(imports.counts[pair] for pair in wrong)} of them upward. Wider arcs are more imports."
    )
    return (
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="100%" role="img" '
        f'font-family="sans-serif" font-size="14" fill="currentColor"><title>The floors of fedcore</title>'
        f"{''.join(boxes)}{''.join(arcs)}</svg><figcaption>{caption}</figcaption></figure>"
    )


def _short(text: str, most: int = 86) -> str:
    return text.rstrip(".") if len(text) <= most else text[: text.rfind(" ", 0, most)].rstrip(",;:") + " …"
