"""Class weights: the numbers, scikit-learn's model, who is asked, and what goes together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight

import fedcore
from fedcore import ConfigError, PluginConflictError, RunConfig
from fedcore.data import load_dataset
from fedcore_class_weights.plugin import balanced
from fedcore_testing import (
    committed,
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

go = federations()
SKEWED = {"imbalance": 20, "client_test_fraction": 0.2}


def test_the_weights_are_those_of_scikit_learn():
    labels = np.repeat([0, 1, 3], [5, 1, 10])
    counts = torch.bincount(torch.from_numpy(labels), minlength=5)
    expected = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    assert balanced(counts)[[0, 1, 3]].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert balanced(counts)[[2, 4]].tolist() == [0.0, 0.0]


def test_the_counts_of_all_training_clients_make_the_weights(go):
    result = go({}, class_weights="balanced", **SKEWED, unseen_clients=0.34, rounds=1)
    split, labels = partition_of(result), load_dataset("digits").train.labels
    rows = torch.cat([*split.train][:2])
    expected = balanced(torch.bincount(labels[rows], minlength=10))
    assert records(result)[0]["reports"]["class-weights"]["weights"] == pytest.approx(expected.tolist())


def test_the_trained_model_is_that_of_scikit_learn(go):
    """One client, all samples in each batch, trained for long: the weighted softmax regression with a penalty."""
    options = {"model": linear, "momentum": 0.9, "batch_size": 5000, "lr": 0.2, "weight_decay": 0.05, "clients": 1}
    result = go({}, class_weights="balanced", imbalance=20, **options, rounds=1, local_epochs=400)
    data, rows = load_dataset("digits"), partition_of(result).train[0]
    x, y = data.train.gather(rows).flatten(1).double().numpy(), data.train.labels[rows].numpy()
    ones = np.c_[x, np.ones(len(x))]  # the bias has the penalty, too
    model = LogisticRegression(
        C=1 / (0.05 * len(x)), fit_intercept=False, class_weight="balanced", tol=1e-8, max_iter=5000
    ).fit(ones, y)
    test = data.test.gather(torch.arange(len(data.test)))
    with torch.no_grad():
        found = result.model(test)[1].softmax(1).numpy()
    expected = model.predict_proba(np.c_[test.flatten(1).double().numpy(), np.ones(len(test))])
    np.testing.assert_allclose(found, expected, atol=5e-3)


def test_equal_classes_are_fedavg(tmp_path):
    """With as many samples of each class all weights are 1."""

    def equal(labels, num_clients, **_):
        first = [np.flatnonzero(labels == c)[:6] for c in range(10)]
        return [np.concatenate([part[3 * k : 3 * k + 3] for part in first]) for k in range(2)]

    found = []
    for choice in ("none", "balanced"):
        config = small_config(tmp_path, clients=2, rounds=2, class_weights=choice)
        found.append(weights(fedcore.run(config, partition=equal)))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-6)


def test_unreachable_clients_are_asked_again(go):
    options = {"class_weights": "balanced", "clients": 6, "system": {"no_show": 0.5}, "min_clients": 0}
    answered = []
    for rounds in (1, 6):
        result = go({}, **options, rounds=rounds)
        state, labels = committed(result).plugins["class-weights"], load_dataset("digits").train.labels
        rows = torch.cat([partition_of(result).train[client] for client in state["answered"]])
        assert state["counts"].tolist() == torch.bincount(labels[rows], minlength=10).tolist()
        answered.append(len(state["answered"]))
    assert 0 < answered[0] < answered[1]


def test_the_option_adds_the_plugin_and_a_run_can_be_read_again(go):
    result = go({"fedprox": {}}, class_weights="balanced", rounds=1)
    assert [*result.config.plugins] == ["fedprox", "class-weights"]
    assert RunConfig(**result.config.written()).plugins == result.config.plugins
    assert "class-weights" not in RunConfig(class_weights="none").plugins
    assert "class-weights" not in RunConfig().plugins, "the default is not shared"


def test_workers_have_the_same_bits(go):
    options = {"class_weights": "balanced", **SKEWED}
    assert model_bytes(go({}, **options, workers=1)) == model_bytes(go({}, **options, workers=0))
    assert not same_tensors(weights(go({}, **options)), weights(go({}, **SKEWED)))


@pytest.mark.parametrize("method", ["fedrs", "ditto"])
def test_another_loss_is_refused(go, method):
    with raises(PluginConflictError, "'class-weights'", f"'{method}'"):
        go({method: {}}, class_weights="balanced")


def test_a_task_without_classes_is_refused(go):
    with raises(ConfigError, "'class-weights'", "classes"):
        go({}, class_weights="balanced", task="regression")
