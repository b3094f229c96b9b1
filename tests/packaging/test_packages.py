"""The list of the names that the packages of plugins/ bring is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "packages.py"


def test_the_list_is_current():
    spec = importlib.util.spec_from_file_location("packages", TOOL)
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    assert packages.FILE.read_text(encoding="utf-8") == packages.text(), "run python tools/packages.py"
