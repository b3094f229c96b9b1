"""The part of a program that defines a name."""

from __future__ import annotations

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
