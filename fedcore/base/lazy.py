"""Public names that a module imports on their first use: importing the module itself costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def lazy(module: str, file: str, *further: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module: the names that it offers, sorted.

    These are the names that its source imports for type checkers, each in a line ``from fedcore.base.config import
    RunConfig as RunConfig``: type checkers and programs have one list.

    :param file: the module's file.
    :param further: names that the module defines itself.
    """
    with open(file, encoding="utf-8") as source:  # word by word: to parse it takes as long as to import fedcore
        imports = [words for line in source if (words := line.split())[::2] == ["from", "import", "as"]]
    places = {name: (home, own) for _, home, _, own, _, name in imports}
    names = sorted([*further, *places])

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, own = places[name]
        return getattr(__import__(home, fromlist=[own]), own)

    return attribute, lambda: names, names
