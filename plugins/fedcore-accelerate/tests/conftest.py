"""Short ways to run federations, and modules that tests of this package share."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from fedcore_testing import federate

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def go(tmp_path):
    """Run ``go(PluginClass, (OtherClass, options), "name", **config)`` on digits, in this process."""
    return functools.partial(federate, tmp_path)
