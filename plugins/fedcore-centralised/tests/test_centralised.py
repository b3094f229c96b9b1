"""Centralised training: whose samples it sees, how much work it does, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import fedcore
from fedcore import ConfigError, Plugin, PluginConflictError, hookimpl
from fedcore.client import evaluate
from fedcore.data import Partition, load_dataset
from fedcore_testing import (
    PersonalClassifier,
    client_state,
    federations,
    linear,
    model_bytes,
    partition_of,
    records,
    same_tensors,
    small_config,
    weights,
)
from tests.sentences import raises

SPLIT = {"clients": 4, "partition": "classes", "client_test_fraction": 0.25}
go = federations()


class Counts(Plugin):
    """Keeps what the client trained on, and for how many steps."""

    @hookimpl
    def end_local(self, client):
        client.state.update(classes=client.class_counts, steps=client.steps)


def pooled(partition, clients=None):
    return torch.cat([*partition.train][:clients])


def test_it_is_fedavg_of_one_client_with_all_samples(go, tmp_path):
    """The same bits: nothing but the place of the samples differs."""
    result = go("centralised", **SPLIT, rounds=2)
    split = partition_of(result)
    alone = fedcore.run(small_config(tmp_path, rounds=2, clients=1), partition=[pooled(split).numpy()])
    assert same_tensors(weights(result), weights(alone))
    assert not same_tensors(weights(result), weights(go({}, **SPLIT, rounds=2)))


def test_held_out_parts_and_tables_are_those_of_the_federation(go):
    result, fedavg = go("centralised", **SPLIT, rounds=2), go({}, **SPLIT, rounds=2)
    split = partition_of(result)
    assert split.sha256 == partition_of(fedavg).sha256
    assert result.metrics.keys() == fedavg.metrics.keys()
    data, hits = load_dataset("digits"), 0
    for part in split.test:
        hits += int(evaluate(result.model, data.train, 10, torch.device("cpu"), indices=part).correct.sum())
    found = result.metrics["global_local"]
    assert found["clients"] == 4
    assert found["accuracy"] == pytest.approx(hits / sum(map(len, split.test)), abs=1e-12)


@pytest.mark.slow
def test_logistic_regression_agrees_with_scikit_learn(go):
    """Trained to the end with a penalty, the pooled linear model is scikit-learn's on the pooled samples."""
    options = {"model": linear, "momentum": 0.0, "batch_size": 5000, "lr": 0.5, "weight_decay": 0.05}
    result = go("centralised", **{**SPLIT, "partition": "dirichlet"}, **options, rounds=1, local_epochs=1500)
    data, rows = load_dataset("digits"), pooled(partition_of(result))
    x, y = data.train.gather(rows).flatten(1).double().numpy(), data.train.labels[rows].numpy()
    test = data.test.gather(torch.arange(len(data.test)))
    # The intercepts have the penalty, too: a column of ones in place of scikit-learn's own.
    ones = np.c_[x, np.ones(len(x))]
    reference = LogisticRegression(C=1 / (0.05 * len(x)), fit_intercept=False, tol=1e-10, max_iter=5000).fit(ones, y)
    expected = reference.predict_proba(np.c_[test.flatten(1).double().numpy(), np.ones(len(test))])
    with torch.no_grad():
        found = result.model(test)[1].softmax(1).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"local_epochs": 3}, lambda n: 3 * -(-n // 16)),
        ({"local_epochs": 3, "participation": 0.5}, lambda n: -(-n // 16) + -(-(round(1.5 * n) - n) // 16)),
        ({"local_epochs": 1, "participation": 0.25}, lambda n: -(-round(0.25 * n) // 16)),
        ({"local_steps": 5}, lambda n: 20),
        ({"local_steps": 5, "participation": 0.5}, lambda n: 10),
    ],
)
def test_the_work_is_that_of_the_cohort(go, options, steps):
    result = go({"centralised": {}, Counts: {}}, **SPLIT, **options, rounds=1, batch_size=16)
    data, rows = load_dataset("digits"), pooled(partition_of(result))
    state, (line, *_) = client_state(result, 0)["counts"], records(result)
    assert state["classes"].tolist() == torch.bincount(data.train.labels[rows], minlength=10).tolist()
    assert state["steps"] == steps(len(rows))
    assert line.get("local_steps", {"0": state["steps"]}) == {"0": state["steps"]}
    assert (line["cohort"], line["accepted"], line["failures"]) == ([0], 1, [])


def test_partial_work_draws_other_samples_in_each_round(go):
    class Seen(Plugin):
        @hookimpl
        def observe(self, step):
            step.client.scratch.setdefault("rows", []).append(step.indices)

        @hookimpl
        def end_local(self, client):
            rows = torch.cat(client.scratch["rows"])
            client.state[f"rows{client.round}"] = rows

    result = go({"centralised": {}, Seen: {}}, **SPLIT, participation=0.25, local_epochs=1, rounds=2)
    first, second = (client_state(result, 0)["seen"][f"rows{number}"].tolist() for number in (0, 1))
    assert len(set(first)) == len(first)
    assert set(first) != set(second)


def test_unseen_clients_keep_their_samples(go):
    result = go(
        {"centralised": {}, Counts: {}}, **{**SPLIT, "clients": 5}, unseen_clients=0.2, adapt_epochs=1, rounds=1
    )
    split = partition_of(result)
    assert client_state(result, 0)["counts"]["classes"].sum() == len(pooled(split, 4)) < len(pooled(split))
    assert result.metrics["unseen"]["clients"] == result.metrics["unseen_adapted"]["clients"] == 1


def test_a_sample_that_clients_share_counts_once(tmp_path):
    def overlapping(labels, num_clients, **_):
        return [[0, 1, 2, 3], [2, 3, 4, 5]]

    overlapping.shares_samples = True
    config = small_config(tmp_path, clients=2, rounds=1)
    result = fedcore.run(config, plugins={"centralised": {}, Counts: {}}, partition=overlapping)
    assert int(client_state(result, 0)["counts"]["classes"].sum()) == 6


def test_engines_and_resumed_runs_have_the_same_bits(go):
    options = {**SPLIT, "rounds": 2, "participation": 0.5}
    assert model_bytes(go("centralised", **options, workers=1)) == model_bytes(go("centralised", **options, workers=0))


@pytest.mark.parametrize(
    ("other", "options", "named"),
    [
        (PersonalClassifier, {}, ("'centralised'",)),
        ({"fedcme": {}}, {"local_epochs": 4}, ()),
        ({"noisy-clients": {"inputs": 0.1}}, {}, ()),
        ({"scaffold": {"weighting": "uniform"}}, {}, ("'scaffold'",)),
    ],
)
def test_methods_that_need_clients_are_refused(go, other, options, named):
    others = other if isinstance(other, dict) else {other: {}}
    with raises(PluginConflictError, *named):
        go({"centralised": {}, **others}, **SPLIT, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"min_clients": 2}, ("min_clients", "2")), ({"system": {"dropout": 0.1}}, ("--system",))],
)
def test_options_that_need_clients_are_refused(go, options, named):
    with raises(ConfigError, *named):
        go("centralised", **SPLIT, **options)


def test_clients_that_hold_their_own_data_are_refused(go):
    from fedcore_centralised import Centralised

    declared = Partition.declared([3, 4], [1, 1], "digits")
    with raises(ConfigError):
        Centralised().assign_samples(None, declared)
