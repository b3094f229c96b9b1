"""The part of a script or notebook that defines a name: imports, functions, classes and constants that it needs.

Nothing else of the program is executed in a worker process, so a script needs no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcore.base.statements import bound_names, changed, is_definition, used_names


class NotDefined(Exception):
    """A name is not defined by the source alone; the message says why."""


def definitions(source: str, names: Iterable[str], live: Mapping[str, Any] | None = None) -> str:
    """Return the statements of a program that define names, with all that these need, in their order.

    A function needs the last definition of what it uses; what a statement uses at once, such as a class its base, needs
    the last one before it. Both may be there: a cell of a notebook can be executed again.

    :param live: the program's names as they are now, which the statements have to agree with.
    :raises NotDefined: a name is computed by the program: by a call, in a loop, from input; or it was changed since.
    """
    body = ast.parse(source).body
    first = [s for s in body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    stars = [place for place, s in enumerate(body) if isinstance(s, ast.ImportFrom) and s.names[0].name == "*"]
    head = "\n".join(map(ast.unparse, first))
    bound: dict[str, list[int]] = {}
    for place, statement in enumerate(body):
        for name in bound_names(statement):
            bound.setdefault(name, []).append(place)
    waiting, seen, chosen = [(name, len(body)) for name in names], set[tuple[str, int]](), set(stars)
    while waiting:
        name, end = waiting.pop()
        if (name, end) in seen:
            continue
        seen.add((name, end))
        found = _binding(body, [place for place in bound.get(name, ()) if place < end])
        if not found and not (hasattr(builtins, name) or name.startswith("__") or stars):
            raise NotDefined(f"{name!r} is not defined in the program's source")
        if not all(is_definition(body[place]) for place in found):
            raise NotDefined(f"{name!r} is computed by the program")
        for place in set(found) - chosen:
            chosen.add(place)
            now = place + _may_not_bind(body[place])  # its branches may use what they bind
            waiting += [(used, len(body) if later else now) for used, later in used_names(head, body[place])]
    kept = [body[place] for place in sorted(chosen) if body[place] not in first]
    last = {name for name, places in bound.items() if places[-1] in chosen}
    for name in changed([*first, *kept], {name: value for name, value in (live or {}).items() if name in last}):
        raise NotDefined(f"{name!r} was changed by the program")
    return "\n".join(map(ast.unparse, [*first, *kept])) + "\n"


def all_definitions(source: str, line: int) -> str:
    """Return what defines the functions and classes of a program that starts its first run in a line.

    Left out are those that the program computes, and those that are defined otherwise after the run than before it.
    """
    body = ast.parse(source).body
    before = [statement for statement in body if statement.lineno < line]
    early, late = ("\n".join(map(ast.unparse, statements)) for statements in (before, body))
    names = [name for s in body if isinstance(s, (ast.FunctionDef, ast.ClassDef)) for name in bound_names(s)]
    usable = []
    for name in dict.fromkeys(names):
        try:
            text = definitions(late, [name])
            if not any(name in bound_names(s) for s in before) or definitions(early, [name]) == text:
                usable.append(name)
        except NotDefined:
            continue
    return definitions(late, usable)


def _binding(body: Sequence[ast.stmt], places: Sequence[int]) -> list[int]:
    """Return the places of the last binding: back to the first that binds whatever the program's branches are."""
    found: list[int] = []
    for place in reversed(places):
        found.append(place)
        if not _may_not_bind(body[place]):
            break
    return found


def _may_not_bind(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.If, ast.Try))
