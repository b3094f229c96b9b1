"""FedETF: the frame, the loss against NumPy, a whole run in NumPy's float64, and what is trained and sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import ConfigError, PluginConflictError, SplitModel
from fedcore_fedetf import SimplexClassifier, simplex_etf
from fedcore_testing import (
    OwnTaskLoss,
    client_arrays,
    committed,
    federations,
    initial_weights,
    mean_by_hand,
    model_bytes,
    records,
    sgd_by_hand,
    small_config,
    weights,
)
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 5}
go = federations()


# --- the equations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (3, 5), (10, 10), (10, 64)])
def test_the_frame_is_a_simplex(classes, width):
    v = simplex_etf(classes, width).double().numpy()
    expected = classes / (classes - 1) * (np.eye(classes) - 1 / classes)
    np.testing.assert_allclose(v.T @ v, expected, atol=1e-6)


def test_logits_are_scaled_cosines():
    classifier = SimplexClassifier(torch.tensor([[1.0, 0.0], [0.0, -1.0]]), beta=3.0)
    assert classifier(torch.tensor([[0.6, 0.8]])).tolist() == [[pytest.approx(1.8), pytest.approx(-2.4)]]
    assert [name for name, p in classifier.named_parameters() if p.requires_grad] == ["beta"]


# --- a whole run ------------------------------------------------------------------------------------------------


def flat(num_classes, input_shape):
    return SplitModel(nn.Flatten(), 64, num_classes)


def step_by_hand(w, v, x, y, logs):
    """Return the gradient of the balanced loss of the projected input, by name."""
    g = x @ w["encoder.etf.0.weight"].T + w["encoder.etf.0.bias"]
    norm = np.linalg.norm(g, axis=1, keepdims=True)
    mu, beta = g / norm, w["classifier.beta"]
    z = beta * mu @ v + logs
    p = np.exp(z - z.max(1, keepdims=True))
    error = (p / p.sum(1, keepdims=True) - y) / len(x)
    dmu = beta * error @ v.T
    dg = (dmu - mu * (dmu * mu).sum(1, keepdims=True)) / norm
    beta_gradient = (error * (mu @ v)).sum()
    return {"encoder.etf.0.weight": dg.T @ x, "encoder.etf.0.bias": dg.sum(0), "classifier.beta": beta_gradient}


@pytest.mark.parametrize("least", [0, 1])
def test_a_run_is_the_method_in_numpy(go, tmp_path, least):
    """Two rounds of full batches with momentum and weight decay; clients lack classes."""
    options = {**SKEWED, "model": flat, "local_epochs": 2, "batch_size": 5000, "lr": 0.1, "weight_decay": 1e-2}
    result = go({"fedetf": {"least": least}}, **options)
    start = initial_weights(small_config(tmp_path, "fedetf", **options))
    v = start["classifier.vectors"].double().numpy()
    w = {name: tensor.double().numpy() for name, tensor in start.items() if name != "classifier.vectors"}
    clients = client_arrays(result)

    def gradient(own, x, y):
        logs = np.where((y.sum(0) > 0) | (least > 0), np.log(np.maximum(y.sum(0), 1)), -np.inf)
        return step_by_hand(own, v, x, y, logs)

    for _ in range(2):
        local = [sgd_by_hand(gradient, w, x, y, 2, lr=0.1) for x, y in clients]
        w = mean_by_hand(local, [len(x) for x, _ in clients])
    for name, value in w.items():
        np.testing.assert_allclose(weights(result)[name], value, atol=2e-5)


def test_class_vectors_neither_move_nor_travel(go, tmp_path):
    result = go("fedetf", **SKEWED)
    start = initial_weights(small_config(tmp_path, "fedetf", **SKEWED))
    after = result.model.state_dict()
    still = [name for name in start if torch.equal(after[name], start[name])]
    assert still == ["classifier.vectors"]
    sent = sum(tensor.numel() for name, tensor in start.items() if name != "classifier.vectors")
    assert committed(result).ledger["by_plugin"]["model"]["up"] == 2 * 3 * 4 * sent


def test_features_have_unit_length_and_the_chosen_width(go):
    model = go({"fedetf": {"width": 12}}, rounds=1).model.eval()
    features = model(torch.rand(5, 1, 8, 8)).features
    assert features.shape == (5, 12)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(5))


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"width": 12}, {"beta": 1.0}, {"gamma": 0.0}, {"gamma": 0.5}, {"least": 0}]
    assert len({model_bytes(go({"fedetf": change}, **SKEWED)) for change in changes}) == len(changes)


def test_a_width_below_the_classes_is_refused(go):
    with raises(ConfigError, "fedetf.width", "4", "10"):
        go({"fedetf": {"width": 4}})


def test_another_task_loss_is_refused(go):
    with raises(PluginConflictError, "'fedetf'", "'owntaskloss'", "task_loss"):
        go("fedetf", OwnTaskLoss)


@pytest.mark.parametrize(("other", "does"), [("ccvr", "corrects"), ("fedpac", "combines")])
def test_another_use_of_the_fixed_classifier_is_refused(go, other, does):
    words = f"'{other}' {does} the classifier, but the class vectors of 'fedetf'"
    with raises(PluginConflictError, words):
        go("fedetf", other)


def test_clients_may_keep_heads_that_are_not_combined(go):
    result = go("fedetf", ("fedpac", {"combine": False}), local_epochs=2, rounds=1)
    assert records(result)[0]["failures"] == []


def test_learns_digits(go):
    assert go("fedetf", rounds=4, local_epochs=2, batch_size=16).metrics["global"]["accuracy"] > 0.6
