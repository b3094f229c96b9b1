"""The examples run, and are what they say they are."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedcore
from fedcore.base.serial import read_tensors
from fedcore_testing import check_plugin, federate, same_tensors, weights
from tests.support import run_code

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(EXAMPLES / name))


def test_quickstart(example, capsys):
    result = example("quickstart.py")["main"](2)
    assert 0 < result.metrics["global"]["accuracy"] <= 1
    printed = capsys.readouterr().out
    assert "moon.contrast" in printed.splitlines()[1]
    assert str(result.directory) in printed


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"participation": 0.5, "rounds": 3},
        {"partition": "iid", "clients": 3, "batch_size": 7, "lr_decay": 0.5, "momentum": 0.0, "rounds": 2},
        {"model": "simple-cnn", "projection": True, "clients": 2, "rounds": 2, "memory_format": "contiguous"},
    ],
    ids=["sampled", "decayed", "convolutions"],
)
def test_fedavg_by_hand_gives_the_engines_weights_bit_by_bit(example, tmp_path, options):
    common = {"model": "mlp", "local_epochs": 2, "device": "cpu", "workers": 0, "seed": 5}
    config = fedcore.RunConfig(**{**common, **options}, out=tmp_path / "run")
    before = torch.get_num_threads()
    try:
        analytic_federation = example("fedavg_by_hand.py")["main"](config)
    finally:
        torch.set_num_threads(before)
    engine, _ = read_tensors(fedcore.run(config).directory / "model.safetensors")
    assert set(analytic_federation) == set(engine)
    assert [name for name, tensor in engine.items() if not torch.equal(tensor, analytic_federation[name])] == []


@pytest.mark.slow
def test_combine_methods(example, capsys):
    module = example("combine_methods.py")
    accuracies = module["main"](1)
    assert list(accuracies) == list(module["CHOICES"])
    printed = capsys.readouterr().out
    assert "before the correction" in printed
    assert "refused: " in printed
    assert "'fedper' keeps on each client" in printed


@pytest.mark.slow
def test_your_data_runs_as_its_users_run_it(tmp_path):
    """As a script in a process of its own, with workers that must find the module again."""
    script = str(EXAMPLES / "your_data.py")
    code = f"""
import os, runpy, sys
os.chdir({str(tmp_path)!r})
sys.argv, sys.path[:] = [{script!r}, "4"], [{str(EXAMPLES)!r}, *filter(None, sys.path)]
runpy.run_path({script!r}, run_name="__main__")
"""
    done = run_code(code, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    accuracy = float(re.match(r"([\d.]+)% of the test wines", done.stdout)[1])
    assert accuracy > 85


@pytest.mark.slow
def test_texts_are_learned(tmp_path, monkeypatch):
    """Of three parts of SciPy, in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import text_topics

    monkeypatch.setattr(text_topics, "TOPICS", ("interpolate", "ndimage", "spatial"))
    options = {"plugins": {"fedprox": {}}, "rounds": 3, "clients": 4, "lr": 0.5, "workers": 0}
    config = fedcore.RunConfig(dataset="module:text_topics.scipy_topics", **options, out=tmp_path / "run")
    assert fedcore.run(config).metrics["global"]["accuracy"] > 0.6  # the largest of three classes is 38 %


@pytest.mark.slow
def test_text_topics_runs_with_workers_that_do_not_know_the_module(tmp_path):
    """They map its sequences: the example sets no PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(EXAMPLES / "text_topics.py"), "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"round \d: ([\d.]+)% of the test texts", done.stdout)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 35  # the largest of nine classes is 28 %


def test_the_first_method_keeps_the_contract_and_is_fedprox_at_first(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES / "first_method")
    from fedcore_my_method import MyMethod

    from fedcore_fedprox import FedProx

    assert "failed" not in {verdict.status for verdict in check_plugin(MyMethod, slow=False)}
    one = {"rounds": 1, "local_epochs": 1}
    own = weights(federate(tmp_path, (MyMethod, {"strength": 0.5}), **one))
    theirs = weights(federate(tmp_path, (FedProx, {"mu": 0.5}), **one))
    assert same_tensors(own, theirs)


def test_every_example_is_tested():
    """Here, or in a file of its own."""
    here = "".join(file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("test_*.py")))
    modules = EXAMPLES.glob("first_method/*.py")
    names = [path.name for path in EXAMPLES.glob("*.py")] + [path.stem for path in modules]
    assert [name for name in names if name not in here] == []
