"""Trackers that a process can import by name, and what they wrote down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch, tmp_path):
    """Let trackers of ``odd_trackers.py`` be named as module:odd_trackers.NAME, here and in their processes."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def calls():
    """Return what the recorder of a run was called with: [method, arguments] each."""

    def read(directory):
        return [json.loads(line) for line in (directory / "calls.jsonl").read_text().splitlines()]

    return read
