"""benchmarks/linear_probe.py fits what it says, and reads a run's own accuracy."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import fedcore
from fedcore.base.process import one_thread

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linear_probe.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(autouse=True)
def alone():
    """Thousands of tiny operations wait for each other's threads on a busy machine."""
    with one_thread():
        yield


def test_offsets_undo_a_shift_of_the_logits(script):
    generator = torch.Generator().manual_seed(0)
    logits, shift = torch.randn(20_000, 3, generator=generator), torch.tensor([1.0, -2.0, 0.5])
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    offsets = script["class_offsets"](logits + shift, labels)
    torch.testing.assert_close(offsets - offsets.mean(), shift.mean() - shift, atol=0.05, rtol=0)


def test_a_new_classifier_separates_what_a_line_separates(script):
    features = torch.randn(500, 4, generator=torch.Generator().manual_seed(1))
    labels = (features[:, 0] > 0.3).long()
    weight, bias = script["linear_classifier"](features, labels, 2)
    assert script["accuracy"](features @ weight.T + bias, labels) > 98


@pytest.mark.slow
def test_a_run_is_read_as_it_was_evaluated(script, tmp_path, monkeypatch, capsys):
    options = {"model": "mlp", "projection": True, "clients": 4, "alpha": 0.1, "rounds": 2, "workers": 0}
    result = fedcore.run(fedcore.RunConfig(**options, out=tmp_path / "run"))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(result.directory)])
    script["main"]()
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| run |")
    _, test, offsets, new = map(float, re.findall(r"\d+\.\d\d", row))
    assert test == pytest.approx(100 * result.metrics["global"]["accuracy"], abs=0.01)
    assert max(offsets, new) > test, "two rounds at Dirichlet 0.1 leave the classifier a bias"
