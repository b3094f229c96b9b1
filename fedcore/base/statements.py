"""Statements of a program: the names that they bind and use, and whether these still are what the statements say."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPUTES = (ast.Call, ast.Await, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple, list, set, frozenset, dict)
_ABSENT = object()


def is_definition(statement: ast.stmt) -> bool:
    """Whether a statement only defines: another process can execute it, without repeating the program's work."""
    if isinstance(statement, _DEFINES):
        return True
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return not any(map(_computes, ast.walk(statement)))
    if isinstance(statement, ast.If):
        differs = any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))
        return not differs and all(map(is_definition, (*statement.body, *statement.orelse)))
    if isinstance(statement, ast.Try):
        handled = [inner for handler in statement.handlers for inner in handler.body]
        return all(map(is_definition, (*statement.body, *handled, *statement.orelse, *statement.finalbody)))
    return False


def _computes(node: ast.AST) -> bool:
    """Whether an expression calls something, or reads the command line, which other processes do not have."""
    return isinstance(node, _COMPUTES) or (isinstance(node, ast.Attribute) and node.attr == "argv")


def bound_names(statement: ast.stmt) -> list[str]:
    """Return the global names that a statement binds."""
    return [s.get_name() for s in _table("", statement).get_symbols() if s.is_assigned() or s.is_imported()]


def used_names(head: str, statement: ast.stmt) -> Iterator[tuple[str, bool]]:
    """Yield the global names that a statement uses, and whether it does so later: when a function is called.

    :param head: imports from ``__future__``, which may leave annotations unread.
    """
    table = _table(head, statement)
    waiting = [(table, False)]
    while waiting:
        scope, later = waiting.pop()
        later = later or scope.get_type() == "function"
        waiting += [(inner, later) for inner in scope.get_children()]
        used = [s for s in scope.get_symbols() if s.is_referenced() and (scope is table or s.is_global())]
        yield from ((symbol.get_name(), later) for symbol in used)


def _table(head: str, statement: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(f"{head}\n{ast.unparse(statement)}", "<statement>", "exec")


def changed(body: Sequence[ast.stmt], live: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that the program has as something else than statements say.

    Looks at constants that are written out, at functions and methods by their names, and into classes. What cannot be
    told is passed over.

    :param live: the program's names.
    """
    last = {name: statement for statement in body for name in bound_names(statement)}
    for name, statement in last.items():
        value = live.get(name, _ABSENT)
        if isinstance(statement, ast.ClassDef) and isinstance(value, type):
            members = {key: member for key, member in vars(value).items() if _is_comparable(member)}
            yield from (f"{name}.{member}" for member in changed(statement.body, members))
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and value is not _ABSENT:
            if not statement.decorator_list and getattr(value, "__name__", None) != name:
                yield name
        elif value is not _ABSENT and any(_differ(constant, value) for constant in _constants(statement, name)):
            yield name


def _constants(statement: ast.stmt, name: str) -> Iterator[Any]:
    """Yield what an assignment gives a name, where the value is written out."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            for expression in _given_to(name, target, statement.value):
                with suppress(ValueError):
                    yield ast.literal_eval(expression)


def _given_to(name: str, target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    """Yield the expression whose value a name is given, also in ``a, b = 1, 2``."""
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for inner, part in zip(target.elts, value.elts, strict=True):
            yield from _given_to(name, inner, part)


def _is_comparable(member: Any) -> bool:
    """Whether an attribute of a class is what its body bound; others, such as an Enum's, were made of it."""
    return type(member) in (FunctionType, *_PLAIN)


def _differ(one: Any, other: Any) -> bool:
    return not (type(one) is type(other) and one == other) and repr(one) != repr(other)  # nan is not equal to nan
