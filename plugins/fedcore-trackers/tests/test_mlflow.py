"""Runs in local MLflow stores, read back with MLflow's own client."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import yaml

import fedcore
from fedcore import Interrupted, resume
from fedcore.tools import RunDirectory
from fedcore_testing import federate, small_config
from fedcore_trackers.mlflow import MLflow, MLflowOptions
from fedcore_trackers.testing import check_tracker


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a store's artifacts are put beside the working folder's files
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Make a sqlite store once: its many migrations take longer than a run."""
    from mlflow import MlflowClient  # takes a second, in each process that collects tests

    file = tmp_path_factory.mktemp("made") / "store.db"
    MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file


def runs_of(uri, experiment="fedcore"):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    return client, client.search_runs([found.experiment_id])


def history(client, run, name):
    return [(metric.step, pytest.approx(metric.value)) for metric in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["default", "folder"])
def test_a_run_is_in_a_local_store(tmp_path, store, monkeypatch, made):
    uri = f"sqlite:///{shutil.copy(made, 'mlflow.db')}" if store == "default" else str(tmp_path / store)
    options = {} if store == "default" else {"uri": uri}
    config = small_config(tmp_path, "moon", rounds=9, alpha=0.3, trackers={"mlflow": options})
    result = fedcore.run(config, on_round=lambda row: row["round"] == 3, notify=lambda event, details: None)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for this test's reader; the tracker sets its own
    client, (run,) = runs_of(uri)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == result.directory.name
    assert run.data.tags["fedcore.plugins"] == "moon"
    assert {name: run.data.params[name] for name in ("alpha", "plugins", "moon.mu", "seed", "clip_norm")} == {
        "alpha": "0.3",
        "plugins": "moon",
        "moon.mu": "1.0",
        "seed": "0",
        "clip_norm": "None",
    }
    lines = RunDirectory(result.directory).metrics.read()
    assert history(client, run, "global/accuracy") == [
        (n, r["metrics"]["global"]["accuracy"]) for n, r in enumerate(lines, start=1)
    ]
    assert history(client, run, "loss/task") == [(n, r["losses"]["task"]) for n, r in enumerate(lines, start=1)]
    assert [step for step, _ in history(client, run, "loss/moon.contrast")] == [2, 3]
    assert history(client, run, "bytes/up") == [(n, r["bytes"]["up"]) for n, r in enumerate(lines, start=1)]
    assert history(client, run, "final/global/accuracy") == [(3, result.metrics["global"]["accuracy"])]
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert kept == {"config.yaml", "summary.json"}
    config = client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path))
    with open(config, encoding="utf-8") as file:
        assert yaml.safe_load(file) == yaml.safe_load((result.directory / "config.yaml").read_text())


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_run(tmp_path, made):
    def stop(event, details):
        if event == "round" and details["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    uri = f"sqlite:///{shutil.copy(made, tmp_path)}"
    with pytest.raises(Interrupted):
        federate(tmp_path, rounds=5, checkpoint_every=2, trackers={"mlflow": {"uri": uri}}, out=out, notify=stop)
    _, (run,) = runs_of(uri)
    assert run.info.status == "KILLED"
    resume(out, allow_code=True, allow_outside=True, changes={"rounds": 6})
    client, (again,) = runs_of(uri)
    assert again.info.run_id == run.info.run_id
    assert again.info.status == "FINISHED"
    assert [step for step, _ in history(client, again, "loss/task")] == [1, 2, 3, 4, 5, 6]
    assert again.data.params["rounds"] == "5"
    assert {name: value for name, value in again.data.tags.items() if "resumed" in name} == {"resumed.rounds": "6"}


@pytest.mark.slow
def test_a_server_that_does_not_answer_costs_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    heard = []
    result = federate(
        tmp_path,
        rounds=1,
        trackers={"mlflow": {}},
        notify=lambda event, details: heard.append(details["message"]) if event == "note" else None,
    )
    assert result.summary["rounds"] == 1
    (note,) = heard
    assert "tracker 'mlflow' is switched off: start raised MlflowException" in note


@pytest.mark.slow
def test_it_keeps_the_contract(tmp_path, made):
    uri = f"sqlite:///{shutil.copy(made, tmp_path)}"
    check_tracker("mlflow", tmp_path, {"uri": uri, "experiment": "contract"})
    _, found = runs_of(uri, "contract")
    assert [run.info.status for run in found] == ["FINISHED"] * 2


def test_a_domain_has_a_name_that_mlflow_takes():
    """It refuses others, and the tracker was switched off at the first evaluation."""
    tracker, logged = MLflow(MLflowOptions()), []
    tracker.id, tracker.client = "run", SimpleNamespace(log_batch=lambda run, metrics: logged.extend(metrics))
    tracker.evaluation(0, {"global": {"accuracy": 0.5, "domains": {"Art (B&W), l'été": 0.25}}})
    named = {metric.key: metric.value for metric in logged}
    assert named == {"global/accuracy": 0.5, "global/domains/Art _B_W__ l_été": 0.25}
