"""The list of the names that the packages of plugins/ bring is current."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from fedcore.base.registry import group_of

TOOL = Path(__file__).parents[2] / "tools" / "packages.py"

WITHOUT_NAMES = {"fedcore.starts"}
"""Groups whose names nobody writes."""


@pytest.fixture(scope="module")
def packages():
    spec = importlib.util.spec_from_file_location("packages", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_is_current(packages):
    assert packages.FILE.read_text(encoding="utf-8") == packages.text(), "run python tools/packages.py"


def test_every_group_of_entry_points_is_in_the_list(packages):
    """A name of another group would be unknown without its package, and nobody would say which package that is."""
    files = (packages.ROOT / "plugins").glob("*/pyproject.toml")
    groups = {name for file in files for name in tomllib.loads(file.read_text())["project"].get("entry-points", {})}
    ours = {name for name in groups if name.startswith("fedcore.")}
    assert ours - WITHOUT_NAMES == {group_of(kind) for kind in packages.KINDS} & ours
    assert len(ours) > 20
