"""Public names that a module imports on their first use: importing the module itself costs nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any


def lazy(module: str, file: str, *further: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module: the names that it offers, sorted.

    These are the names that its source imports for type checkers, ``from fedcore.base.config import RunConfig as
    RunConfig``: what these see and what a program finds is one list.

    :param file: the module's file.
    :param further: names that the module defines itself.
    """
    with open(file, encoding="utf-8") as source:
        imports = [node for node in ast.walk(ast.parse(source.read())) if isinstance(node, ast.ImportFrom)]
    places = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names if alias.asname}
    names = sorted([*further, *places])

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, own = places[name]
        return getattr(__import__(home or "", fromlist=[own]), own)

    return attribute, lambda: names, names
