"""Commands that read runs show a task's first figure where others have the accuracy, and know what is better."""

from __future__ import annotations

import csv
import importlib.util
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import fedcore
from fedcore.tools import app

rng = np.random.default_rng(5)
X = rng.normal(size=(80, 3)).astype(np.float32)
Y = 40 + 7 * X[:, 0] + rng.normal(size=80)
SETTINGS = {"dataset": (X[:60], Y[:60], X[60:], Y[60:]), "rounds": 3, "clients": 3, "client_test_fraction": 0.25}
SETTINGS |= {"workers": 0, "device": "cpu", "progress": False, "partition": "iid", "local_epochs": 2, "batch_size": 8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two rates with two seeds each; the lower rate learns nothing."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        (lr, seed): fedcore.run(lr=lr, seed=seed, out=folder / f"{lr}-{seed}", **SETTINGS)
        for lr in (1e-6, 0.1)
        for seed in (0, 1)
    }


def call(*words):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def folders(runs):
    return [result.directory for result in runs.values()]


def test_compare(runs):
    table = call("compare", *folders(runs), "--by", "lr")
    assert "Lowest mean rmse: 0.1 with" in table
    rows = {
        row["row"]: row
        for row in csv.DictReader(call("compare", *folders(runs), "--by", "lr", "--format", "csv").splitlines())
    }
    own = [runs[0.1, seed].metrics["global"]["rmse"] for seed in (0, 1)]
    assert float(rows["0.1"]["rmse_mean"]) == pytest.approx(np.mean(own))
    tex = call("compare", *folders(runs), "--by", "lr", "--protocol", "global_local", "--latex")
    bold = [line for line in tex.splitlines() if line.startswith("0.1 &")]
    assert "".join(bold).count("textbf") == 6  # rmse, mae, r2, and their means over clients
    assert not any("textbf" in line for line in tex.splitlines() if line.startswith("1e-06 &"))


@pytest.mark.parametrize(("figure", "own"), [("rmse", "per_client"), ("mae", "mae_per_client")])
def test_a_column_per_client(runs, figure, own):
    asked = ("--by", "lr", "--protocol", "global_local", "--metric", figure, "--columns", "clients", "--format", "csv")
    rows = {row["row"]: row for row in csv.DictReader(call("compare", *folders(runs), *asked).splitlines())}
    found = [runs[0.1, seed].metrics["global_local"][own]["1"] for seed in (0, 1)]
    assert float(rows["0.1"]["client_client 1_mean"]) == pytest.approx(np.mean(found))


def test_compare_to_a_target(runs):
    """A target of an error is reached by a smaller one."""
    last = max(runs[0.1, seed].metrics["global"]["rmse"] for seed in (0, 1))
    words = ["compare", *folders(runs), "--by", "lr", "--target", last, "--format", "csv"]
    rows = {row["row"]: row for row in csv.DictReader(call(*words).splitlines())}
    assert (rows["0.1"]["rounds_n"], rows["1e-06"]["rounds_n"]) == ("2", "0")


def test_a_figure_of_another_run_is_not_compared(runs, tmp_path):
    from fedcore_testing.problems import few_digits

    classes = fedcore.run(
        dataset=few_digits, rounds=1, clients=3, workers=0, device="cpu", out=tmp_path / "c", progress=False
    )
    done = CliRunner().invoke(app, ["compare", *map(str, folders(runs)), str(classes.directory)])
    assert done.exit_code == 0
    assert "did not measure 'accuracy' are left out" in " ".join(done.output.split())


def test_report(runs, tmp_path):
    call("report", *folders(runs), "--by", "lr", "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Rmse over rounds, global" in page
    assert "Rmse by client" in page
    assert "Accuracy over rounds" not in page
    assert "accuracy %" not in page


def test_a_report_of_one_round_has_no_curve_of_the_tasks_figure(tmp_path):
    once = fedcore.run(out=tmp_path / "once", **SETTINGS | {"rounds": 1})
    call("report", once.directory, "--points", 0, "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Rmse over rounds" in page
    assert "Accuracy over rounds" not in page


def test_evidence_has_the_final_figures(runs, tmp_path):
    call("results", "add", runs[0.1, 0].directory, "--to", tmp_path)
    (written,) = tmp_path.glob("**/*.json")
    row = json.loads(written.read_text())["figures"]["global"]
    assert row["rmse"] == pytest.approx(runs[0.1, 0].metrics["global"]["rmse"], abs=1e-6)


def test_runs_list_and_show(runs):
    folder = folders(runs)[0].parent
    value = runs[0.1, 0].metrics["global"]["rmse"]
    assert f"rmse {value:.4g}" in call("runs", "list", folder)
    listed = json.loads(call("runs", "list", folder, "--json"))
    assert {run["accuracy"] for run in listed} == {None}
    assert f"rmse {value:.4g}" in {run["figure"] for run in listed}
    shown = call("runs", "show", runs[0.1, 0].directory)
    assert "accuracy" not in shown
    assert f"{value:.4f}" in shown


def test_a_sweep_names_the_figure(tmp_path):
    words = ["--dataset", "digits", "--task", "regression", "--rounds", 1, "--clients", 3, "--workers", 0]
    done = CliRunner().invoke(app, ["sweep", *map(str, words), "--seeds", "1", "--out", str(tmp_path / "s")])
    assert done.exit_code == 0, done.output
    assert ", rmse " in done.output


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs optuna")
@pytest.mark.slow
def test_a_search_takes_the_smaller_error(tmp_path):
    words = ["sweep", "--optuna", 3, "--search", "lr=1e-6,0.05", "--dataset", "digits", "--task", "regression"]
    words += ["--rounds", 1, "--clients", 3, "--client-test-fraction", 0.2, "--out", tmp_path / "s", "--json"]
    result = json.loads(call(*words))
    errors = {trial["trial"]: trial["rmse"] for trial in result["trials"] if trial["state"] == "complete"}
    assert len(errors) > 1
    assert result["best"] == min(errors, key=errors.__getitem__)


def test_the_best_round_and_patience_follow_any_figure(tmp_path):
    """``--best-by mae`` takes the round with the smallest error on held-out parts, and stops when none is smaller."""
    result = fedcore.run(**SETTINGS | {"rounds": 30}, best_by="mae", patience=2, lr=0.1, out=tmp_path / "r")
    best = result.summary["metrics"]["best_by_validation"]
    errors = [record["metrics"]["global_local"]["mae"] for record in result.records if "round" in record]
    assert best["validation_mae"] == min(errors)
    assert best["round"] == errors.index(min(errors)) + 1
    assert len(errors) == min(30, best["round"] + 2)
