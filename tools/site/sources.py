"""Functions, classes and hooks of the packages, found in their sources; nothing is imported."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import NamedTuple

from links import ROOT

SHARED = "fedcore_functional"
"""The package whose functions the methods' cards name."""


class Definition(NamedTuple):
    """One function or class at the top of a module.

    :param path: its dotted path; ``node`` its syntax tree; ``text`` its source.
    """

    path: str
    node: ast.FunctionDef | ast.ClassDef
    text: str

    @property
    def docstring(self) -> str:
        """What it says of itself."""
        return ast.get_docstring(self.node) or ""


@functools.cache
def definitions(folder: Path, prefix: str) -> dict[str, Definition]:
    """Return what the modules of a package define at the top, by name."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        found.update(_defined_in(file, prefix if file.stem == "__init__" else f"{prefix}.{file.stem}"))
    return found


@functools.cache
def _defined_in(file: Path, module: str) -> dict[str, Definition]:
    """Return what one module defines at the top, by name."""
    text = file.read_text(encoding="utf-8")
    return {
        node.name: Definition(f"{module}.{node.name}", node, _source(text, node))
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def package_definitions(package: Path) -> dict[str, Definition]:
    """Return what a plugin package defines."""
    (folder,) = (path for path in (package / "src").iterdir() if (path / "__init__.py").exists())
    return definitions(folder, folder.name)


def shared_definition(path: str) -> Definition | None:
    """Return what the package of shared parts defines at a dotted path."""
    module, _, name = path.rpartition(".")
    if module.partition(".")[0] != SHARED:
        return None
    place = ROOT / "plugins" / "fedcore-functional" / "src" / module.replace(".", "/")
    known = definitions(place, module) if place.is_dir() else _defined_in(place.with_suffix(".py"), module)
    return known.get(name)


def entry_points(package: Path) -> dict[str, str]:
    """Return the plugins that a package provides: name -> ``module:Class``."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points: dict[str, str] = project.get("entry-points", {}).get("fedcore.plugins", {})
    return points


def plugin_packages() -> list[Path]:
    """Return the folders of our plugin packages that provide methods."""
    folders = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
    return [folder for folder in folders if entry_points(folder)]


@functools.cache
def implementers() -> dict[str, list[tuple[str, str]]]:
    """Return by hook the (plugin, package) pairs that implement it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for package in plugin_packages():
        known = package_definitions(package)
        for name, point in entry_points(package).items():
            for hook in _hooks(point.partition(":")[2], known):
                found.setdefault(hook, []).append((name, package.name))
    return found


def _hooks(cls: str, known: dict[str, Definition]) -> list[str]:
    """Return the hooks of a class, of its parts and of its bases, where they are of its package or shared."""
    found = known.get(cls) or definitions(ROOT / "plugins/fedcore-functional/src" / SHARED, SHARED).get(cls)
    if found is None or not isinstance(found.node, ast.ClassDef):
        return []
    node = found.node
    parts = [
        name
        for line in ast.walk(node)
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) in ("parts", "self.parts")
        for name in ast.walk(line.value)
    ]
    inherited = [
        hook for base in (*node.bases, *parts) if isinstance(base, ast.Name) for hook in _hooks(base.id, known)
    ]
    own = [
        member.name
        for member in node.body
        if isinstance(member, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "hookimpl" for mark in member.decorator_list)
    ]
    return list(dict.fromkeys([*inherited, *own]))


def _source(text: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
