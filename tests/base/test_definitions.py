"""The part of a program that defines a name."""

from __future__ import annotations

import ast

import pytest

from fedcore.base.definitions import NotDefined, definitions

PROGRAM = """
from __future__ import annotations
import json, torch
from torch import nn
try:
    import numpy as np
except ImportError:
    np = None

WIDTH = 2 * 16
SIZES = [WIDTH, WIDTH // 2]
data = json.loads("[1, 2]")

def unused():
    return data

def scaled(x: torch.Tensor):
    data = x * WIDTH  # a local name
    return [data for data in data] + np.zeros(1)

class Base(nn.Module):
    size = SIZES[0]

class Net(Base):
    def forward(self, x):
        return scaled(x)

class Reader(Net):
    def rows(self):
        return data

print("training ...")
for row in data:
    Last = Net
"""


def test_what_a_class_needs_and_nothing_else():
    found = definitions(PROGRAM, ["Net"])
    lines = found.splitlines()
    assert lines[0] == "from __future__ import annotations"
    assert "class Net(Base):" in lines
    assert "def scaled(x: torch.Tensor):" in lines
    assert (
        lines.index("WIDTH = 2 * 16")
        < lines.index("SIZES = [WIDTH, WIDTH // 2]")
        < lines.index("class Base(nn.Module):")
    )
    assert "import numpy as np" in found
    for other in ("unused", "Reader", "print", "json.loads", "Last"):
        assert other not in found


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Reader", "'data' is computed"), ("Last", "'Last' is computed"), ("Missing", "'Missing' is not defined")],
)
def test_what_the_program_computes_is_named(name, reason):
    with pytest.raises(NotDefined, match=reason):
        definitions(PROGRAM, [name])


def test_the_last_definition_counts():
    """A cell of a notebook that was changed and executed again."""
    found = definitions("A = 1\nclass Net:\n    width = A\nA = 2\nclass Net:\n    width = A * 2\n", ["Net"])
    assert [line for line in found.splitlines() if line] == ["A = 2", "class Net:", "    width = A * 2"]


def test_a_name_that_is_computed_anew_is_not_defined():
    with pytest.raises(NotDefined, match="'Net' is computed"):
        definitions("class Net: ...\nNet = decorate(Net)\n", ["Net"])


CELLS = """from torch import nn
WIDTH = 4
class Net(nn.Module):
    width = WIDTH
    def built(self):
        return nn.Linear(self.width, WIDTH)
from torch import nn
WIDTH = 8
"""


def test_a_class_gets_what_stood_before_it_and_its_methods_what_came_last():
    """The cells of a notebook's imports and constants, executed again after the class."""
    found = definitions(CELLS, ["Net"])
    assert executed(found)["Net"]().built().weight.shape == (8, 4)
    assert found.count("import nn") == 2


def executed(source):
    found = {"__name__": "worker"}
    exec(compile(source, "<worker>", "exec", dont_inherit=True), found)  # noqa: S102 - as a worker does
    return found


def test_a_class_that_could_not_be_defined_at_first_is_left_out():
    """A cell that failed for want of an import, and was executed again."""
    text = "class Net(nn.Module): ...\nfrom torch import nn\nclass Net(nn.Module): ...\n"
    assert definitions(text, ["Net"]).count("class Net") == 1


def test_a_constant_of_a_branch_has_the_one_before_it():
    found = definitions("A = 1\nB = A\nif B > 1:\n    A = 2\ndef Net():\n    return A\n", ["Net"])
    assert executed(found)["Net"]() == 1


def test_imports_from_the_future_of_a_later_cell_come_first():
    found = definitions("import json\nfrom __future__ import annotations\ndef Net(x: Y): return json\n", ["Net"])
    assert executed(found)["Net"](1) is __import__("json")


@pytest.mark.parametrize("text", ["if __name__ == '__main__':\n    A = 2", "import sys\nA = sys.argv[1]"])
def test_what_a_worker_would_decide_otherwise_is_computed(text):
    with pytest.raises(NotDefined, match="'A' is computed"):
        definitions(f"A = 1\n{text}\ndef Net(): return A\n", ["Net"])


def test_what_was_computed_after_its_use_is_no_hindrance():
    found = definitions("A = 1\nclass Net:\n    width = A\nA = read()\n", ["Net"], {"A": 5})
    assert executed(found)["Net"].width == 1


FIRST = """
import functools, math
A, B = 2, -math.inf
SIZES = [2, 4]
NAN = 1e999 - 1e999
def noted(f):
    return functools.wraps(f)(lambda *given: f(*given))
def scale(x, by=A):
    return x * by
class Net:
    mu: float = 0.5
    sizes = {"a": 2}
    @noted
    def forward(self, x):
        return [scale(y) for y in x] + SIZES + [A, B, NAN, super().__repr__(), lambda: A]
    @property
    def first(self):
        return 1
    def last(self):
        return [math.sqrt(A) for _ in range(2)]
"""


@pytest.mark.parametrize("at_once", [True, False], ids=["script", "notebook"])
def test_what_the_program_still_has_is_not_changed(at_once):
    """A notebook compiles statements one by one, which gives other code for the attributes of modules."""
    live = {"__name__": "program"}
    for text in [FIRST] if at_once else map(ast.unparse, ast.parse(FIRST).body):
        exec(text, live)  # noqa: S102 - as the program does
    assert "class Net" in definitions(FIRST, ["Net"], live)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("A = 3", "A"),
        ("A = object()", "A"),
        ("A = True", "A"),
        ("SIZES.append(3)", "SIZES"),
        ("scale = max", "scale"),
        ("scale = lambda x, by=A: x + by", "scale"),
        ("Net.mu = 1.0", r"Net\.mu"),
        ("Net.sizes['a'] = 1", r"Net\.sizes"),
        ("Net.last = scale", r"Net\.last"),
    ],
)
def test_what_the_program_changed_is_named(change, name):
    """By a function with ``global``, by an assignment to an attribute, or in a cell that is not in the history."""
    live = executed(FIRST)
    exec(change, live)  # noqa: S102 - as the program does
    with pytest.raises(NotDefined, match=f"'{name}' was changed by the program"):
        definitions(FIRST, ["Net"], live)
