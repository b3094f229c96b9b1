"""Short runs on digits, in this process."""

from __future__ import annotations

import tempfile

import pytest
import torch

import fedcore
from fedcore import RunConfig
from fedcore.rundir import RunDirectory
from fedcore.serial import read_tensors

SMALL = {"workers": 0, "device": "cpu", "clients": 3, "rounds": 2, "local_epochs": 1, "batch_size": 100}


class Finished:
    """What a run left behind."""

    def __init__(self, result):
        self.metrics, self.model, self.path = result.metrics, result.model, result.directory
        self.directory = RunDirectory(result.directory)
        self.weights = read_tensors(result.directory / "model.safetensors")[0]
        self.rounds = [record for record in self.directory.read_metrics() if "round" in record]
        self.bytes = (result.directory / "model.safetensors").read_bytes()

    def losses(self, round):
        return self.rounds[round]["losses"]


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors on a busy machine: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def go(tmp_path):
    """Run ``go({"fdcl": {"mu": 1.0}, Recorder: {}}, rounds=2)``; a class of a test module is named by itself."""

    def run(plugins, **options):
        chosen = {
            name if isinstance(name, str) else f"module:{name.__module__}.{name.__name__}": settings
            for name, settings in plugins.items()
        }
        out = tempfile.mkdtemp(dir=tmp_path)
        return Finished(fedcore.run(RunConfig(**{**SMALL, **options}, plugins=chosen, out=out)))

    return run
