"""Every distribution, built as ``make dist`` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """Return the folder of all wheels and sdists."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "dist.py", folder], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
