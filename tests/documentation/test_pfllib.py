"""The table of PFLlib's methods: complete, and true to what is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedcore.base.registry import available
from fedcore.hooks.checks import HOOKS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pfllib.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!method|---)", line)
]


def test_it_has_39_methods_each_with_a_plugin_or_hooks():
    assert len(ROWS) == 39
    assert len({row[0] for row in ROWS}) == 39
    assert not [row[0] for row in ROWS if not row[1] and not row[2]]


def test_every_plugin_that_it_names_exists():
    named = {name for row in ROWS for name in re.findall(r"`([\w-]+)`", row[1])}
    assert {"fedavg", "moon", "fedntd", "fedlc", "fedamp"} <= named
    assert named <= set(available("plugin"))


def test_every_hook_that_it_names_exists():
    words = {name for row in ROWS for name in re.findall(r"`([a-z_]+)`", row[2])}
    assert words - set(HOOKS) <= {"owns", "encodes", "add_parameters"}


@pytest.mark.parametrize("row", [row for row in ROWS if row[1]], ids=lambda row: row[0])
def test_the_size_of_a_package_is_about_what_the_table_says(row):
    """To within a third: sources change, the comparison does not."""
    point = available("plugin")[row[1].strip("`")]
    folder = ROOT / "plugins" / point.dist.name / "src"
    files = folder.rglob("*.py") if point.dist.name != "fedcore" else [ROOT / "fedcore" / "hooks" / "fedavg.py"]
    found = sum(len(file.read_text(encoding="utf-8")) for file in files)
    assert found / int(row[4].replace(",", "")) == pytest.approx(1, abs=1 / 3)
