"""Statements of a program: the names that they bind and use, and whether these still are what the statements say."""

from __future__ import annotations

import ast
import inspect
import symtable
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPUTES = (ast.Call, ast.Await, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr)
_SCALARS = (int, float, complex, str, bytes, bool, type(None))


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
    """Yield the names that the program has as something else than statements say: constants, functions and methods.

    Constants are assigned again; the compiled code of functions is compared. What cannot be told is passed over.

    :param live: the program's names.
    """
    whole = _inner(_compiled(body))  # a script's functions; a notebook compiles statements one by one
    alone = {name: code for statement in body for name, code in _inner(_compiled([statement])).items()}
    modules = {name: value for name, value in live.items() if isinstance(value, ModuleType)}
    yield from _changed(body, (whole, alone), live, modules)


def _changed(
    body: Sequence[ast.stmt], codes: Sequence[Mapping[str, CodeType]], live: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[str]:
    last = {name: statement for statement in body for name in bound_names(statement)}
    values: dict[str, Any] = {}
    for statement in body:
        constants = _constants(statement, {**known, **values})
        for name in bound_names(statement):
            values.pop(name, None)
            if last[name] is not statement or name not in live:
                continue
            if name in constants:
                if _differ(constants[name], live[name]):
                    yield name
            elif isinstance(statement, _DEFINES) and all(name in each for each in codes):
                compiled = [each[name] for each in codes]
                if isinstance(live[name], type) and isinstance(statement, ast.ClassDef):
                    members = {key: value for key, value in vars(live[name]).items() if _is_comparable(value)}
                    inner = _changed(statement.body, [*map(_inner, compiled)], members, {**known, **values})
                    yield from (f"{name}.{member}" for member in inner)
                elif isinstance(live[name], FunctionType) and _other_code(compiled, live[name]):
                    yield name
        values.update(constants)


def _constants(statement: ast.stmt, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants that an assignment binds, given those before it."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return {}
    if not is_definition(statement):
        return {}
    targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    plain = ast.fix_missing_locations(ast.Module([ast.Assign(targets, statement.value)], []))
    values: dict[str, Any] = {}
    try:
        exec(compile(plain, "<constant>", "exec"), dict(known), values)  # noqa: S102 - the program's own, no calls
    except Exception:  # it is made of something else than constants
        return {}
    return {name: value for name, value in values.items() if _is_constant(value)}


def _is_constant(value: Any) -> bool:
    if type(value) in (tuple, list, set, frozenset):
        return all(map(_is_constant, value))
    if type(value) is dict:
        return all(map(_is_constant, (*value, *value.values())))
    return type(value) in _SCALARS


def _is_comparable(value: Any) -> bool:
    """Whether an attribute of a class is what its body bound; others, such as an Enum's, were made of it."""
    return isinstance(value, FunctionType) or _is_constant(value)


def _differ(one: Any, other: Any) -> bool:
    return not (type(one) is type(other) and one == other) and repr(one) != repr(other)  # nan is not equal to nan


def _compiled(body: Sequence[ast.stmt]) -> CodeType:
    return compile(ast.Module(list(body), []), "<program>", "exec", dont_inherit=True)


def _inner(code: CodeType) -> dict[str, CodeType]:
    """Return the code of the functions and classes that a code defines, by name."""
    return {inner.co_name: inner for inner in code.co_consts if isinstance(inner, CodeType)}


def _other_code(codes: Sequence[CodeType], function: FunctionType) -> bool:
    """Whether a function, where a decorator tells it, was compiled from something else."""
    live = inspect.unwrap(function).__code__
    return live.co_name == codes[0].co_name and _content(live) not in map(_content, codes)


def _content(code: CodeType) -> tuple[Any, ...]:
    """Return what a code does, wherever its lines stand."""
    constants = [_content(inner) if isinstance(inner, CodeType) else repr(inner) for inner in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
