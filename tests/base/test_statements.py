"""Which names a statement binds and uses, and when."""

from __future__ import annotations

import ast

import pytest

from fedcore.base.statements import bound_names, changed, is_definition, used_names


@pytest.mark.parametrize(
    ("text", "bound", "at_once", "later"),
    [
        ("import a.b, c as d", {"a", "d"}, set(), set()),
        ("a = b.c + d", {"a"}, {"b", "d"}, set()),
        ("def f(x: a, y=b):\n    z = c\n    return z(x, d)", {"f"}, {"a", "b"}, {"c", "d"}),
        ("class A(b):\n    c = d\n    def e(self): return f(self, g)", {"A"}, {"b", "d"}, {"f", "g"}),
        ("f = lambda x: a(x)", {"f"}, set(), {"a"}),
    ],
)
def test_the_names_of_a_statement(text, bound, at_once, later):
    (statement,) = ast.parse(text).body
    assert set(bound_names(statement)) == bound
    used = set(used_names("", statement))
    assert {name for name, late in used if not late} == at_once
    assert {name for name, late in used if late} == later


@pytest.mark.parametrize("text", ["a = b()", "a += 1", "del a", "for a in b: pass", "if __name__ == 'x': a = 1"])
def test_what_computes_is_no_definition(text):
    assert not is_definition(ast.parse(text).body[0])


def test_what_a_class_makes_of_its_attributes_is_no_change():
    text = "import enum\nclass Kind(enum.Enum):\n    ONE = 1\n"
    live = {}
    exec(text, live)  # noqa: S102 - as the program does
    assert list(changed(ast.parse(text).body, live)) == []
