"""A finished run in Python: its text, its picture, its history, and the same read back."""

from __future__ import annotations

import shutil

import pytest
import torch

import fedcore
from fedcore import Plugin, RunConfig, RunDirectoryError, hookimpl
from fedcore.base import registry
from fedcore.base.identity import title
from fedcore.runs.rounds import history_rows
from tests.sentences import raises, warns


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = RunConfig(
        plugins=["fedprox"], clients=3, rounds=4, eval_every=2, local_epochs=1, samples=200, workers=0,
        client_test_fraction=0.3, out=tmp_path_factory.mktemp("result") / "run",
    )  # fmt: skip
    return fedcore.run(config)


def test_the_text_is_one_line(finished):
    accuracy = f"{100 * finished.metrics['global']['accuracy']:.2f}"
    assert repr(finished).startswith(
        f"<RunResult fedprox on digits, 4 rounds, accuracy: global {accuracy} %, global_local"
    )
    assert "\n" not in repr(finished)
    assert str(finished.directory) in repr(finished)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [("digits", "digits"), ("npz:scans.npz", "npz:scans.npz"), ("module:study.data.scans", "scans")],
)
def test_a_headline_names_the_data(dataset, words):
    assert title(RunConfig(dataset=dataset, plugins=["module:study.Near"])) == f"Near on {words}"


def test_without_fedcore_console_a_notebook_shows_one_line(finished, monkeypatch):
    assert "<table>" in finished._repr_html_()
    monkeypatch.setattr(registry, "available", lambda kind: {})
    assert finished._repr_html_() is None


def test_history_is_a_row_per_round(finished):
    rows = finished.history
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert ["global.accuracy" in row for row in rows] == [False, True, False, True]
    last = finished.records[-1]
    assert rows[-1]["global_local.worst10"] == last["metrics"]["global_local"]["worst10"]
    assert rows[-1]["loss.task"] == last["losses"]["task"]
    assert rows[-1]["lr"] == last["lr"]
    assert rows[-1]["bytes.up"] == last["bytes"]["up"]
    assert (rows[0]["clients"], rows[0]["failed"]) == (3, 0)


def test_history_has_what_plugins_report(tmp_path):
    class Counting(Plugin):
        @hookimpl
        def report(self, server):
            return {"seen": server.round + 1, "spent": {"epsilon": 0.5 * server.round}}

    options = {"clients": 2, "rounds": 2, "local_epochs": 1, "samples": 100, "workers": 0, "out": tmp_path / "run"}
    rows = history_rows(fedcore.run(RunConfig(**options), plugins=[Counting]).records)
    found = [{key: value for key, value in row.items() if key.startswith("report.")} for row in rows]
    assert found == [
        {"report.counting.seen": 1, "report.counting.spent.epsilon": 0.0},
        {"report.counting.seen": 2, "report.counting.spent.epsilon": 0.5},
    ]


def test_a_finished_run_is_read_back(finished):
    again = fedcore.load_run(str(finished.directory))
    assert again.metrics == finished.metrics
    assert again.config == finished.config
    assert repr(again) == repr(finished)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(again.model(x).logits, finished.model(x).logits)
    assert not again.model.training


def test_a_run_below_the_home_is_read_back(finished, monkeypatch):
    monkeypatch.setenv("HOME", str(finished.directory.parent))
    assert fedcore.load_run("~/run").metrics == finished.metrics


def test_a_damaged_model_is_named(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished.directory, copy)
    (copy / "model.safetensors").write_bytes(b"nothing")
    for problem in ("model.safetensors cannot be read: .*", "model.safetensors is missing"):  # as safetensors says
        with pytest.raises(RunDirectoryError, match=rf"{problem}\. fedcore resume .*copy writes it again"):
            fedcore.load_run(copy)
        (copy / "model.safetensors").unlink(missing_ok=True)
    fedcore.resume(copy)
    assert fedcore.load_run(copy).metrics == finished.metrics
    (copy / "summary.json").write_bytes(b"{")
    with raises(RunDirectoryError, "summary.json"):
        fedcore.load_run(copy)
    (copy / "summary.json").unlink()
    with raises(RunDirectoryError):
        fedcore.load_run(copy)


@pytest.mark.filterwarnings("ignore:the run is finished")
def test_a_model_without_checkpoints_is_lost(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished.directory, copy, ignore=shutil.ignore_patterns("checkpoint", "model.safetensors"))
    for function in (fedcore.load_run, fedcore.resume):
        with raises(RunDirectoryError, "model.safetensors"):
            function(copy)


def test_damaged_rounds_are_told(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished.directory, copy)
    first, second, *rest = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([first, second[9:], *rest]))
    with warns(RuntimeWarning, "metrics.jsonl", "line 2"):
        again = fedcore.load_run(copy)
    assert len(again.records) == len(finished.records) - 1
