"""The part of a script or notebook that defines a name: imports, functions, classes and constants that it needs.

Nothing else of the program is executed in a worker process, so a script needs no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPUTES = (ast.Call, ast.Await, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr)


class NotDefined(Exception):
    """A name is not defined by the source alone; the message says why."""


def main_source() -> str | None:
    """Return the source of the program that runs: a script, or the cells of a notebook; None where there is none."""
    shell = notebook_shell()
    if shell is not None:
        return "\n".join(cell for cell in shell.history_manager.input_hist_parsed if _parses(cell))
    file = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return Path(file).read_text(encoding="utf-8") if file else None
    except (OSError, ValueError):
        return None


def notebook_shell() -> Any | None:
    """Return IPython's shell where this process is one; None elsewhere."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def definitions(source: str, names: Iterable[str]) -> str:
    """Return the statements of a program that define names, with all that these need, in their order.

    :raises NotDefined: a name is computed by the program: by a call, in a loop, from input.
    """
    tree = ast.parse(source)
    future = [s for s in tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    stars = [s for s in tree.body if isinstance(s, ast.ImportFrom) and s.names[0].name == "*"]
    head = "\n".join(map(ast.unparse, future))
    bound = {name: statement for statement in tree.body for name in _names(head, statement, bound=True)}
    chosen, waiting, seen = {id(s) for s in (*future, *stars)}, list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or (name not in bound and (hasattr(builtins, name) or name.startswith("__") or stars)):
            continue
        seen.add(name)
        statement = bound.get(name)
        if statement is None:
            raise NotDefined(f"{name!r} is not defined in the program's source")
        if not _is_definition(statement):
            raise NotDefined(f"{name!r} is computed by the program")
        if id(statement) not in chosen:
            chosen.add(id(statement))
            waiting += _names(head, statement, bound=False)
    return "\n".join(ast.unparse(statement) for statement in tree.body if id(statement) in chosen) + "\n"


def _is_definition(statement: ast.stmt) -> bool:
    """Whether a statement only defines: it can be executed again without repeating the program's work."""
    if isinstance(statement, _DEFINES):
        return True
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(node, _COMPUTES) for node in ast.walk(statement))
    if isinstance(statement, ast.If):
        return all(map(_is_definition, (*statement.body, *statement.orelse)))
    if isinstance(statement, ast.Try):
        handled = [inner for handler in statement.handlers for inner in handler.body]
        return all(map(_is_definition, (*statement.body, *handled, *statement.orelse, *statement.finalbody)))
    return False


def _names(head: str, statement: ast.stmt, *, bound: bool) -> Iterator[str]:
    """Yield the global names that a statement binds, or those that it uses."""
    table = symtable.symtable(f"{head}\n{ast.unparse(statement)}", "<statement>", "exec")
    if bound:
        yield from (s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported())
        return
    yield from (s.get_name() for s in table.get_symbols() if s.is_referenced())
    waiting = table.get_children()
    while waiting:
        inner = waiting.pop()
        waiting += inner.get_children()
        yield from (s.get_name() for s in inner.get_symbols() if s.is_global() and s.is_referenced())


def _parses(cell: str) -> bool:
    try:
        ast.parse(cell)
    except SyntaxError:
        return False
    return True
