"""A short way to run a federation on digits, in this process."""

import tempfile

import pytest

import fedcore
from fedcore import RunConfig

DIGITS = {"workers": 0, "device": "cpu", "clients": 4, "rounds": 2, "local_epochs": 1, "batch_size": 64}


@pytest.fixture(scope="session")
def go(tmp_path_factory):
    """Run ``go({"fedcd": {...}}, rounds=3, ...)``."""
    root = tmp_path_factory.mktemp("runs")

    def run(plugins, notify=None, **options):
        config = RunConfig(**{**DIGITS, **options}, plugins=plugins, out=tempfile.mkdtemp(dir=root))
        return fedcore.run(config, notify=notify)

    return run
