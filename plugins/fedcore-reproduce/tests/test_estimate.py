"""The time that a table is said to take before it starts."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
import yaml

from fedcore import RunConfig
from fedcore_reproduce import estimate as estimating
from fedcore_reproduce import run as reproducing
from fedcore_reproduce.estimate import PROCESS, Timed, estimate, total, unfinished
from fedcore_reproduce.recipe import read_recipe
from fedcore_study.sweeps.directory import SweepDirectory

from .test_reproduce import SMALL


def test_seconds_are_reckoned_from_one_round():
    base = RunConfig(rounds=10, local_epochs=2, clients=5, samples=1000, eval_every=10)
    timed = Timed(base, setup=1.0, round=3.0, evaluation=0.5)
    assert total(timed, [base]) == pytest.approx(PROCESS + 1 + 30 + 0.5)
    larger = base.model_copy(update={"local_epochs": 4, "participation": 0.5, "samples": 3000, "eval_every": 4})
    assert total(timed, [larger]) == pytest.approx(PROCESS + 1 + 10 * 3 * 2 * 0.5 * 3 + 3 * 0.5)
    everything = base.model_copy(update={"samples": None})  # of so many samples as the data set has
    assert total(timed, [everything]) == total(timed, [base])
    assert total(Timed(everything, 1.0, 3.0, 0.5), [base]) == total(timed, [base])
    personal = base.model_copy(update={"plugins": {"ditto": {}}})  # evaluates a model for each client, too
    assert total(timed, [personal]) == pytest.approx(PROCESS + 1 + 30 + 0.5 * 6)
    assert total(Timed(personal, 1.0, 3.0, 3.0), [base]) == pytest.approx(PROCESS + 1 + 30 + 0.5)


@pytest.fixture
def planned(tmp_path: Path) -> reproducing.Plan:
    file = tmp_path / "table_7.yaml"
    columns = [SMALL["columns"][0], {"name": "b", "options": {"alpha": 5.0}}, SMALL["columns"][2]]
    quick = {"says": "1 round", "options": {"rounds": 1}}
    file.write_text(yaml.safe_dump({**SMALL, "columns": columns, "quick": quick}, sort_keys=False), encoding="utf-8")
    return reproducing.plan(read_recipe(file), "quick")


def test_what_is_finished_takes_no_time(planned, tmp_path):
    everything = unfinished(planned, tmp_path / "none")
    assert len(everything) == 4
    directory = SweepDirectory(tmp_path / "sweep")
    names = directory.add("", [(config.dataset, config) for config in everything])
    directory.run_directory(names[0]).mkdir(parents=True)
    (directory.run_directory(names[0]) / "summary.json").write_text("{}")
    assert unfinished(planned, directory.path) == everything[1:]


def test_one_round_is_timed_and_leaves_nothing(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = estimate(planned, tmp_path / "none", 2)
    assert (found.runs, found.parallel) == (4, 2)
    assert found.timed.round > 0
    assert found.seconds == pytest.approx(total(found.timed, unfinished(planned, tmp_path / "none")) / 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table_7.yaml"]
    told = str(dataclasses.replace(found, seconds=240.0, timed=dataclasses.replace(found.timed, round=0.2)))
    assert told == "about 4 min 00 s for 4 runs, 2 at a time: a round of fedavg takes 0.20 s here now"


def test_no_estimate_for_a_few_runs_or_one_that_cannot_be_trained(planned, tmp_path):
    few = dataclasses.replace(planned, sweep=planned.sweep.model_copy(update={"cases": planned.sweep.cases[:2]}))
    assert estimate(few, tmp_path / "none", 1) is None
    none = dataclasses.replace(planned, sweep=None)
    assert estimate(none, tmp_path / "none", 1) is None
    broken = planned.sweep.model_copy(update={"base": {**planned.sweep.base, "lr": 1e30}})
    assert estimate(dataclasses.replace(planned, sweep=broken), tmp_path / "none", 1) is None


def test_the_command_says_it_before_the_first_run(planned, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedcore.tools import app
    from fedcore_reproduce import find
    from fedcore_study.sweeps import run
    from fedcore_study.sweeps.processes import Outcome

    timed = Timed(RunConfig(), 0.0, 2.0, 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find, "recipe_files", lambda: [tmp_path / "table_7.yaml"])
    monkeypatch.setattr(estimating, "time_round", lambda config: dataclasses.replace(timed, config=config))
    monkeypatch.setattr(run, "run_jobs", lambda jobs, *_, **__: ([Outcome(job.name, "failed") for job in jobs], False))
    command = ["reproduce", "fedprox", "--table", "7", "--parallel", "1"]
    said = CliRunner().invoke(app, command)
    assert "note: about 9.20 s for 4 runs: a round of fedavg takes 2.00 s here now" in said.stderr
    assert said.stderr.index("about 9.20 s") < said.stderr.index("4 runs, 1 at a time")
    assert "about" not in CliRunner().invoke(app, [*command, "--quiet"]).stderr
    assert "about" not in CliRunner().invoke(app, [*command, "--scale", "paper"]).stderr
