"""Studies in Python: sweep, compare and report as functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import fedcore
import fedcore_report
import fedcore_study
from fedcore import ConfigError, Interrupted, RunConfig
from fedcore_study import studies
from fedcore_study.sweeps import run as running
from fedcore_study.sweeps.objects import SweepObjects
from fedcore_study.sweeps.processes import Outcome
from fedcore_testing.stub_plugins import EqualWeights
from tests.sentences import raises

TINY = {"clients": 2, "rounds": 1, "local_epochs": 1, "batch_size": 256, "workers": 0}
METHODS = {"plugin": ["fedavg", "fedprox"]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    return fedcore_study.sweep(METHODS, seeds=3, out=folder / "s", quiet=True, **TINY)


def test_a_sweep_has_the_runs_of_the_command(swept, cli, tmp_path):
    assert {outcome.status for outcome in swept.outcomes} == {"finished"}
    assert len(swept.outcomes) == 6
    options = [word for name, value in TINY.items() for word in ("--" + name.replace("_", "-"), value)]
    asked = ("--grid", "plugin=fedavg,fedprox", "--seeds", 3, "--dry-run")
    assert cli("sweep", *asked, *options).stdout.splitlines()[0] == "fedavg seed=0"
    again = fedcore_study.sweep(METHODS, seeds=range(3), out=swept.directory, quiet=True, **TINY)
    assert [outcome.seconds for outcome in again.outcomes] == [0.0] * 6
    straight = fedcore.run(RunConfig(**TINY, seed=2, plugins=["fedprox"], out=tmp_path / "straight"))
    (name,) = (outcome.name for outcome in swept.outcomes if outcome.name.startswith("fedprox_seed=2"))
    own = swept.directory / "runs" / name / "model.safetensors"
    assert own.read_bytes() == (straight.directory / "model.safetensors").read_bytes()


def test_one_row_per_method(swept):
    frame = fedcore_study.compare(swept)
    assert list(frame.index) == ["fedavg", "fedprox"]
    assert frame.index.name == "method"
    assert list(frame["seeds"]) == [3, 3]
    assert pandas.isna(frame.loc["fedavg", "difference"])
    assert pandas.isna(frame.loc["fedavg", "verdict"])
    assert frame.loc["fedprox", "verdict"] in ("same", "better", "worse")
    difference = frame.loc["fedprox", "accuracy_mean"] - frame.loc["fedavg", "accuracy_mean"]
    assert frame.loc["fedprox", "difference"] == pytest.approx(difference)
    assert frame.attrs["findings"][-1] == "Tested by a paired t-test over the seeds, at level 0.05."
    assert {str(frame[name].dtype) for name in frame if name != "verdict"} == {"float64", "Int64"}


def test_one_row_per_run(swept):
    each = fedcore_study.compare([swept.directory], each=True)
    assert list(each.columns) == ["method", "seed", "accuracy", "rounds", "bytes", "seconds", "directory"]
    assert list(each["seed"]) == [0, 1, 2] * 2
    frame = fedcore_study.compare(str(swept.directory))
    assert list(each.groupby("method")["accuracy"].mean()) == pytest.approx(list(frame["accuracy_mean"]))


def test_results_of_runs_and_settings_in_the_index(tmp_path):
    results = [fedcore.run(RunConfig(**TINY, alpha=alpha, out=tmp_path / f"{alpha}")) for alpha in (0.1, 5.0)]
    frame = fedcore_study.compare(results, target=0.01)
    assert frame.index.names == ["alpha", "method"]
    assert frame.loc[(0.1, "fedavg"), "accuracy_mean"] == results[0].metrics["global"]["accuracy"]
    assert list(frame["rounds_to_target"]) == [1.0, 1.0]
    assert "virtual_seconds_to_target" not in frame
    by = fedcore_study.compare(results, by=["plugin", "alpha"])
    assert list(by.index) == ["fedavg, alpha=0.1", "fedavg, alpha=5.0"]
    assert by.index.name == "method, alpha"
    with raises(fedcore.RunDirectoryError):
        fedcore_study.compare([tmp_path])


def test_a_sweep_goes_on_without_a_grid(tmp_path):
    first = fedcore_study.sweep({"plugin": [EqualWeights]}, out=tmp_path / "s", quiet=True, **TINY)
    (outcome,) = first.outcomes
    assert "EqualWeights" in outcome.name
    with raises(fedcore.ConfigError, "EqualWeights'", "allow_code=True"):  # of a file, which may be a stranger's
        fedcore_study.sweep(out=tmp_path / "s", seeds=[0, 5], quiet=True)
    with raises(fedcore.ConfigError, "sweep.yaml", "allow_code=True"):
        fedcore_study.sweep(tmp_path / "s" / "sweep.yaml", out=tmp_path / "other", quiet=True)
    more = fedcore_study.sweep(out=first, seeds=[0, 5], rounds=2, quiet=True)
    assert more.outcomes[0].name == outcome.name
    assert [found.status for found in more.outcomes] == ["finished", "finished"]
    assert set(fedcore_study.compare(more, each=True)["rounds"]) == {2}
    everything = fedcore_study.sweep(out=tmp_path / "s", quiet=True, allow_code=True)
    assert [found.seconds for found in everything.outcomes] == [0.0, 0.0]


def test_a_sweep_on_a_preset(tmp_path):
    """The grid and the options override it."""
    result = fedcore_study.sweep({"alpha": [5.0]}, preset="digits-quick", out=tmp_path / "s", quiet=True, **TINY)
    (run,) = result.directory.glob("runs/*")
    config = fedcore.load_run(run).config
    assert (config.alpha, config.rounds, config.client_test_fraction) == (5.0, 1, 0.2)
    with raises(ConfigError, "'digits-quik'", "'digits-quick'"):
        fedcore_study.sweep(METHODS, preset="digits-quik")


def test_a_failed_run_is_a_warning_and_a_stop_an_error(tmp_path, monkeypatch):
    ended = {"status": "failed", "message": "no memory"}
    monkeypatch.setattr(running, "run_jobs", lambda jobs, *_, **__: ([Outcome(jobs[0].name, **ended)], False))
    with pytest.warns(RuntimeWarning, match="fedavg_seed=0.* failed: no memory"):
        result = fedcore_study.sweep(seeds=1, out=tmp_path / "s", quiet=True, **TINY)
    assert len(result.named("failed")) == 1
    monkeypatch.setattr(running, "run_jobs", lambda jobs, *_, **__: ([Outcome(jobs[0].name, "stopped")], True))
    with raises(Interrupted):
        fedcore_study.sweep(seeds=1, out=tmp_path / "s", quiet=True, **TINY)


def test_what_cannot_be_swept(tmp_path):
    with raises(ConfigError):
        fedcore_study.sweep(out=tmp_path / "s")
    with raises(ConfigError, "'rounds'"):
        fedcore_study.sweep(METHODS, round=3, out=tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_names_of_plugins(tmp_path):
    (tmp_path / "grid.yaml").write_text("grid: {plugin: [fedavg, moon+uscc], alpha: [0.1, 1]}\n")
    asked = (tmp_path / "grid.yaml", 2, None, {"moon.mu": 5}, {"data_dir": Path("d")})
    spec, folder, goes_on = studies._asked_for(*asked, SweepObjects(), None)
    assert (folder, goes_on) == (Path("sweeps/grid"), False)
    assert spec.base == {"data_dir": "d"}
    assert [config.seed for _, config in spec.cells()] == [0] * 4 + [1] * 4
    named = f"module:{EqualWeights.__module__}.EqualWeights"
    values = [[EqualWeights, "fedprox"], {EqualWeights: {"a": 1}}]
    assert SweepObjects().named("plugin", values) == [[named, "fedprox"], {named: {"a": 1}}]


def test_a_report_is_written(swept, tmp_path):
    page = fedcore_report.report(swept, tmp_path / "page.html", title="Mine", points=0)
    assert "Mine" in page.read_text(encoding="utf-8")
    with raises(fedcore.FedcoreError, "page.html"):
        fedcore_report.report(swept, page)


@pytest.mark.slow
def test_the_pages_program_runs(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs" / "sweeps.md"
    (program,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(page), "exec"), {"__name__": "program"})  # noqa: S102 - our own page
    printed = capsys.readouterr().out
    assert "alpha method" in printed
    assert "alpha 0.1: Highest mean accuracy: " in printed
    assert (tmp_path / "python.html").is_file()


def test_importing_needs_neither_torch_nor_pandas():
    code = "import sys, fedcore_study; fedcore_study.sweep; assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with raises(AttributeError, "'sweeep'"):
        fedcore_study.sweeep  # noqa: B018 - looked up on purpose
