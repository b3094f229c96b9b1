"""Make ``tests.core`` importable by name, here and in worker processes: that is how configs name test plugins."""

import functools
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests import support  # noqa: E402


@pytest.fixture
def go(tmp_path):
    """Run ``go(PluginClass, (OtherClass, options), "name", **config)`` on digits, in this process."""
    return functools.partial(support.run, tmp_path)


@pytest.fixture
def toy(tmp_path):
    """Like ``go``, on the TOY of baselines.md: f_i = |w - centre_i|^2 / 2, lr 0.5, no momentum, two steps."""
    return functools.partial(support.run_toy, tmp_path)
