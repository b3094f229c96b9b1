from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedcore.cli.app import app

Cli = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run a command in an empty folder; ``catch_exceptions`` is off, so a traceback fails the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "FEDCORE_DATA"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)

    return invoke


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "NO_COLOR": "1"}
    )
