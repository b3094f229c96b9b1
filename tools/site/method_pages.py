"""One page per method package: its README card, and the functions that its table of equations names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from docstrings import escape, to_markdown
from links import method_page, relink
from sources import Definition, entry_points, package_definitions, plugin_packages, shared_definition

FRONT_MATTER = re.compile(r"\A---\n(?P<yaml>.*?)\n---\n", re.DOTALL)
SECTION = re.compile(
    r"^## (?:What is (?:implemented|computed)|Equation by equation)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def pages() -> dict[str, str]:
    """Return all method pages by their place on the site."""
    return {method_page(package.name): page(package) for package in plugin_packages()}


def title(package: Path) -> str:
    """Return a page's name in the navigation: the plugins that the package provides."""
    return ", ".join(entry_points(package))


def page(package: Path) -> str:
    """Return a package's page."""
    card = (package / "README.md").read_text(encoding="utf-8")
    front = FRONT_MATTER.match(card)
    said = yaml.safe_load(front["yaml"]) if front else {}
    text = relink(
        card[front.end() :] if front else card, f"plugins/{package.name}/README.md", method_page(package.name)
    )
    known = package_definitions(package)
    section = SECTION.search(text)
    named = _named(section["text"], known) if section else []
    if section:
        linked = _link_names(_escape_tables(section["text"]), named)
        text = f"{text[: section.start('text')]}{linked.rstrip()}\n\n{_code(named)}{text[section.end('text') :]}"
    text += f"\n\n## The plugin\n\n{_plugins(package, known)}"
    labels = f"*{', '.join(map(str, said['labels']))}*\n\n" if said.get("labels") else ""
    return re.sub(r"\A\s*(# .+\n)\s*", lambda heading: f"{heading[1]}\n{labels}", text)


def _named(section: str, known: dict[str, Definition]) -> list[Definition]:
    """Return the definitions that a card's section names, in the order of the equations."""
    found: dict[str, Definition] = {}
    for name in NAME.findall(section):
        definition = known.get(name) or shared_definition(name)
        if definition is not None and not name.startswith("_"):
            found.setdefault(definition.path, definition)
    return [definition for definition in found.values() if not _is_plugin(definition)]


def _is_plugin(definition: Definition) -> bool:
    return "@hookimpl" in definition.text


def _code(named: list[Definition]) -> str:
    """Return the functions with what they say and their source, one after the other."""
    if not named:
        return ""
    parts = ["### The code of the equations"]
    for definition in named:
        name = definition.path.rpartition(".")[2]
        parts.append(f"#### `{name}` {{#{name}}}\n\nIn `{definition.path.rpartition('.')[0]}`.")
        parts.append(to_markdown(definition.docstring))
        parts.append(f"```python\n{without_docstring(definition)}\n```")
    return "\n\n".join(parts) + "\n\n"


def without_docstring(definition: Definition) -> str:
    """Return a definition's source without the docstring that stands above it on the page."""
    body = definition.node.body
    if not definition.docstring or len(body) < 2:
        return definition.text
    lines = definition.text.splitlines()
    offset = min([definition.node.lineno, *(mark.lineno for mark in definition.node.decorator_list)])
    first, last = body[0].lineno - offset, (body[0].end_lineno or 0) - offset
    return "\n".join(lines[:first] + lines[last + 1 :])


def _link_names(section: str, named: list[Definition]) -> str:
    """Return the section with the names of functions as links to their code."""
    anchors = {definition.path: definition.path.rpartition(".")[2] for definition in named}
    anchors.update({anchor: anchor for anchor in anchors.values()})

    def linked(found: re.Match[str]) -> str:
        return f"[{found[0]}](#{anchors[found[1]]})" if found[1] in anchors else found[0]

    return NAME.sub(linked, section)


def _escape_tables(section: str) -> str:
    """Return the section with inner products in its tables as text: ``<c, w>`` is no tag."""
    return "\n".join(escape(line) if line.startswith("|") else line for line in section.splitlines())


def _plugins(package: Path, known: dict[str, Definition]) -> str:
    """Return the plugins' classes by mkdocstrings, hooks with their source; bases that hold them come first."""
    parts, shown = [], set()
    for name, point in entry_points(package).items():
        definition = known[point.partition(":")[2]]
        bases = [] if _is_plugin(definition) else [known[base] for base in _bases(definition) if base in known]
        parts.append(f"`--plugin {name}`")
        for path in [each.path for each in (*bases, definition) if each.path not in shown]:
            shown.add(path)
            parts.append(f"::: {path}\n    options:\n      show_source: true\n      heading_level: 3")
    return "\n\n".join(parts) + "\n"


def _bases(definition: Definition) -> list[str]:
    """Return the names of a class's base classes."""
    return [base.id for base in getattr(definition.node, "bases", []) if isinstance(base, ast.Name)]
