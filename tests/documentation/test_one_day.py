"""One researcher's day: own network and data, two methods, three seeds, predictions, runs looked back at, a report."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import fedcore
import fedcore_report
import fedcore_study
from fedcore.cli.app import app

STUDY = '''
import numpy as np
from sklearn.datasets import load_digits
from torch import nn


def images(data_dir=None):
    """Return grey images of 8x8 pixels: 1,000 to train, 400 to test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.images[order] * 15).astype("uint8"), digits.target[order]
    return x[:1000], y[:1000], x[1000:1400], y[1000:1400]


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.head(self.body(x))
'''
OWN = "--dataset module:study.images --model module:study.Net --clients 3 --local-epochs 1 --workers 0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the researcher's module, on the import path as with ``PYTHONPATH=.``."""
    (tmp_path / "study.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("study", None)


def fedcore_(line):
    """Run a command as in a terminal, and return what it prints on stdout; it must not fail."""
    done = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert done.exit_code == 0, f"fedcore {line}: {done.output}"
    return done.stdout


@pytest.mark.slow
def test_by_commands(folder):
    fedcore_(f"train {OWN} --rounds 2 --name first --tag try")
    fedcore_(f"train {OWN} --rounds 2 --name second --plugin fedprox --set fedprox.mu=0.1 --quiet")
    fedcore_(f"sweep --grid plugin=fedavg,fedprox --seeds 3 --rounds 1 {OWN} --out sweeps/day --quiet")
    assert "fedprox" in fedcore_("compare sweeps/day --baseline fedavg")
    fedcore_("report sweeps/day --out day.html --points 0 --allow-code")
    assert (folder / "day.html").stat().st_size > 50_000
    listed = json.loads(fedcore_("runs list --json"))
    assert {run["name"] for run in listed} == {"first", "second", None}, "the sweep's runs stand there, too"
    assert len(json.loads(fedcore_("runs list sweeps --sort accuracy --json"))) == 6
    fedcore_("runs tag second --add paper")
    assert "fedprox.mu" in fedcore_("runs diff first second")
    run_dir = json.loads(fedcore_("runs show second --json"))["path"]
    assert "rounds   2 of 2" in fedcore_("runs show second")
    fedcore_(f"resume {run_dir} --rounds 3 --allow-code --quiet")
    fedcore_(f"evaluate {run_dir} --allow-code")
    result = fedcore.load_run(run_dir, allow_code=True)
    assert result.summary["rounds"] == 3
    x_new, y_new = digits_that_no_client_saw()
    assert np.mean(result.predict(x_new) == y_new) > 0.5


@pytest.mark.slow
def test_in_python(folder):
    import study

    runs = {}
    for plugins in ([], {"fedprox": {"mu": 0.1}}):
        result = fedcore.run(
            dataset=study.images, model=study.Net, plugins=plugins, clients=3, rounds=2, local_epochs=1, workers=0
        )
        runs[repr(plugins)] = result
        x_new, y_new = digits_that_no_client_saw()
        assert result.predict(x_new).shape == (len(x_new),)
        assert result.evaluate(x_new, y_new)["accuracy"] == pytest.approx(np.mean(result.predict(x_new) == y_new))
    assert isinstance(result.network, study.Net)
    swept = fedcore_study.sweep(
        {"plugin": ["fedavg", "fedprox"]},
        seeds=3,
        dataset="module:study.images",
        model="module:study.Net",
        clients=3,
        rounds=1,
        local_epochs=1,
        workers=0,
        out="sweeps/day",
        quiet=True,
    )
    table = fedcore_study.compare(swept)
    assert list(table["seeds"]) == [3, 3]
    assert fedcore_report.report(swept, "day.html", points=0, allow_code=True).exists()


def digits_that_no_client_saw():
    """Return raw images that belong to neither part of the study's data, and their digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))[1400:]
    return (digits.images[order] * 15).astype("uint8"), digits.target[order]
