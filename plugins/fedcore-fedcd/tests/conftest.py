"""A short way to run a federation on digits, in this process."""

import pytest

from fedcore.testing import federate


@pytest.fixture(scope="session")
def go(tmp_path_factory):
    """Run ``go({"fedcd": {...}}, rounds=3, ...)``."""
    root = tmp_path_factory.mktemp("runs")
    return lambda plugins, **options: federate(root, *plugins.items(), **{"clients": 4, **options})
