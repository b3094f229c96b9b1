"""Objects in a sweep: networks, plugins and data of a script or notebook reach the runs' processes by value."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from torch import nn

import fedcore
import fedcore_report
import fedcore_study
from fedcore import ConfigError
from fedcore.data import Partition, as_dataset
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_testing.stub_plugins import EqualWeights
from tests.sentences import raises

TINY = {"clients": 2, "rounds": 1, "local_epochs": 1, "batch_size": 256, "workers": 0}

PROGRAM = """
import contextlib
import numpy as np
from torch import nn
import fedcore, fedcore_study
from fedcore import Plugin, hookimpl
from fedcore_study.sweeps import warm

SCALE = 2.0

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(5, num_classes)

    def forward(self, x):
        return self.head(x / SCALE)

class Heavy(Plugin):
    neutral = {}

    @hookimpl
    def weight(self, update, server):
        return SCALE

if COLD:
    warm.template = lambda *modules, outlived: contextlib.nullcontext()
x = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
data = (x[:40], np.arange(40) % 3, x[40:], np.arange(20) % 3)
options = {"model": Net, "dataset": data, "clients": 2, "rounds": 1, "workers": 0}
result = fedcore_study.sweep({"plugin": [Heavy]}, seeds=1, out="s", quiet=True, **options)
assert [outcome.status for outcome in result.outcomes] == ["finished"], result.outcomes
(run,) = result.directory.glob("runs/*")
alone = fedcore.run(plugins=Heavy, seed=0, out="alone", progress=False, **options)
assert (run / "model.safetensors").read_bytes() == (alone.directory / "model.safetensors").read_bytes()
"""


@pytest.mark.slow
@pytest.mark.parametrize("cold", [False, True], ids=["forked from one process", "one by one"])
def test_classes_and_data_of_a_program(cold, tmp_path):
    program = PROGRAM.replace("COLD", str(cold))
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, timeout=120)
    assert ended.returncode == 0, "the program's own assertions hold"


def arrays(seed=0):
    x = np.random.default_rng(seed).normal(size=(60, 5)).astype("float32")
    return x[:40], np.arange(40) % 3, x[40:], np.arange(20) % 3


def network(hidden):
    def make(num_classes, input_shape):
        return nn.Sequential(nn.Linear(*input_shape, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    make.__name__ = f"width-{hidden}"
    return make


@pytest.mark.slow
def test_networks_as_an_axis_and_a_report_with_their_features(tmp_path):
    grid = {"model": [network(4), network(8)], "plugin": ["fedavg", {EqualWeights: {}}]}
    result = fedcore_study.sweep(grid, dataset=arrays(), out=tmp_path / "s", quiet=True, **TINY)
    assert repr(result) == f"<SweepResult 4 runs: 4 finished; {tmp_path / 's'}>"
    assert [outcome.name.rpartition("_")[0] for outcome in result.outcomes][:2] == [
        "fedavg_model=width-4_seed=0",
        "EqualWeights_model=width-4_seed=0",
    ]
    frame = fedcore_study.compare(result, by=["plugin", "model"], baseline="fedavg, model=width-4")
    assert frame.index[0] == "fedavg, model=width-4"
    assert len(frame) == 4
    page = fedcore_report.report(result, tmp_path / "r.html", by="model", allow_code=True).read_text(encoding="utf-8")
    assert "is an object that a Python program gave" not in page
    page = fedcore_report.report(tmp_path / "s", tmp_path / "r2.html", allow_code=True).read_text(encoding="utf-8")
    assert "is an object that a Python program gave" in page


def test_objects_are_given_again_and_data_stay_the_same(tmp_path):
    data = arrays()
    fedcore_study.sweep(seeds=1, dataset=data, out=tmp_path / "s", quiet=True, **TINY)
    more = fedcore_study.sweep(out=tmp_path / "s", seeds=2, dataset=data, quiet=True)
    assert [bool(outcome.seconds) for outcome in more.outcomes] == [False, True]
    again = fedcore_study.sweep(out=more, seeds=3, quiet=True)
    assert [bool(outcome.seconds) for outcome in again.outcomes] == [False, False, True]
    with raises(ConfigError, "dataset=arrays"):
        fedcore_study.sweep(out=tmp_path / "s", quiet=True)
    with raises(fedcore.RunDirectoryError):
        fedcore_study.sweep(out=tmp_path / "s", dataset=arrays(1), quiet=True)


def test_what_cannot_be_given(tmp_path):
    locked = type("Locked", (EqualWeights,), {"__module__": "__main__", "lock": threading.Lock()})
    with raises(ConfigError, "methods.py"):
        fedcore_study.sweep({"plugin": ["fedavg", locked]}, out=tmp_path / "s")
    with raises(ConfigError, "dataset=arrays"):
        fedcore_study.sweep({"dataset": [arrays(), arrays(1)]}, out=tmp_path / "s")
    with raises(ConfigError):
        fedcore_study.sweep({"tracker": [locked]}, out=tmp_path / "s")
    for lists in ([[0, 1], [2, 3]], [np.arange(2), np.arange(2, 4)], Partition([[0], [1]], [[], []])):
        with raises(ConfigError):
            fedcore_study.sweep(partition=lists, out=tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    named = {"dataset": [as_dataset(arrays(seed), f"draw-{seed}") for seed in (0, 1)]}
    result = fedcore_study.sweep(named, out=tmp_path / "s", quiet=True, **TINY)
    plan = SweepDirectory(result.directory).plan()
    assert [config.dataset for config in plan.values()] == ["object:draw-0", "object:draw-1"]
