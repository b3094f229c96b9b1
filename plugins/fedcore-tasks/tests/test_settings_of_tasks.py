"""Domains, sources, unseen clients and groups of labels, for tasks without classes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedcore
from fedcore import DataError
from fedcore.data import Domains, as_dataset, load_partition, make_partition
from fedcore.tools import app
from tests.sentences import raises

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 3)).astype(np.float32)
Y = 5 + X[:, 0] + 0.1 * rng.normal(size=200)
SETTINGS = {"rounds": 2, "workers": 0, "device": "cpu", "progress": False, "lr": 0.1}


def dataset():
    plain = as_dataset((X[:150], Y[:150], X[150:], Y[150:]), "table")
    domains = Domains(("p", "q"), torch.arange(150) % 2, torch.arange(50) % 2)
    return replace(plain, domains=domains, sources=torch.arange(150) % 5)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_worst_domain_is_that_of_the_largest_error():
    result = fedcore.run(dataset=dataset(), clients=4, **SETTINGS)
    row = result.metrics["global"]
    assert result.metrics["worst_domain"]["rmse"] == max(row["domains"].values())
    worst_r2 = min(row["r2_domains"].values())
    assert result.metrics["worst_domain"]["r2"] == pytest.approx(worst_r2)
    errors = [result.evaluate(X[150 + k :: 2], Y[150 + k :: 2])["rmse"] for k in range(2)]
    assert [row["domains"]["p"], row["domains"]["q"]] == pytest.approx(errors)


def test_a_hidden_domain_has_figures_of_its_own_and_no_part_in_the_statistics():
    result = fedcore.run(dataset=dataset(), clients=4, unseen_domain="q", **SETTINGS)
    assert result.task.mean == [pytest.approx(Y[:150:2].mean())]
    assert result.metrics["unseen_domain"]["rmse"] == pytest.approx(result.evaluate(X[151::2], Y[151::2])["rmse"])


def test_sources_become_clients_of_which_some_never_train():
    options = {"partition": "natural", "unseen_clients": 0.4, "client_test_fraction": 0.3}
    result = fedcore.run(dataset=dataset(), clients=5, plugins=["ditto"], **options, **SETTINGS)
    parts = load_partition(result.directory / "partition.json", dataset()).train
    trained = torch.cat(list(parts)[:3]).numpy()
    assert result.task.mean == [pytest.approx(Y[trained].mean())]
    assert fedcore.load_run(result.directory, dataset=dataset()).task.mean == result.task.mean
    assert {"unseen", "personal", "global_local"} <= {name for name, row in result.metrics.items() if row}
    assert len(result.metrics["unseen"]["rmse_per_client"]) == 2
    assert len(result.metrics["personal"]["rmse_per_client"]) == 3


def test_a_dirichlet_partition_divides_by_events():
    """With a tiny alpha, the share of events differs more between clients than by chance."""
    time, event = rng.exponential(size=400), rng.random(400) < 0.5
    x = np.zeros((400, 2), dtype=np.float32)
    survival = as_dataset((x, np.column_stack([time, event]), x[:4], np.column_stack([time, event])[:4]))
    spread = {}
    for name in ("dirichlet", "iid"):
        options = fedcore.RunConfig(partition=name, alpha=0.05, clients=5)
        spread[name] = np.std([event[part.numpy()].mean() for part in make_partition(survival, options).train])
    assert spread["dirichlet"] > 2 * spread["iid"]


def test_an_exported_model_says_how_its_outputs_become_predictions(tmp_path):
    """The card of a client's own model has its errors in the targets' units, and the numbers that turn outputs back."""
    options = {"dataset": "digits", "task": "regression", "clients": 3, "client_test_fraction": 0.2, "lr": 0.01}
    result = fedcore.run(plugins=["ditto"], **SETTINGS | options)
    words = ["export", str(result.directory), "--to", "torch", "--client", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"A prediction is the output times {result.task.std}, plus {result.task.mean}." in card
    assert "Outputs (B, 1) of the task regression" in card
    assert f"{result.metrics['personal']['rmse_per_client']['1']:.4f}" in card
    assert "accuracy %" not in card


@pytest.mark.parametrize("task", ["survival", "survival-discrete"])
def test_times_without_a_single_event_are_refused(task):
    """Cox's loss was 0 for them, whatever the model says. Test samples without an event leave the figure undefined."""
    time, happened = np.abs(X[:, 0]), np.arange(200) < 150
    never, labels = np.column_stack([time, np.zeros(200)]), np.column_stack([time, happened])
    with raises(DataError, f"'{task}'", 150):
        fedcore.run(dataset=(X[:150], never[:150], X[150:], labels[150:]), clients=2, task=task, **SETTINGS)
    result = fedcore.run(dataset=(X[:150], labels[:150], X[150:], labels[150:]), clients=2, task=task, **SETTINGS)
    assert result.metrics["global"]["c-index"] is None
