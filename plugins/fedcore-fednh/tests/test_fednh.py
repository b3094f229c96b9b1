"""FedNH: the equations against NumPy, two rounds in NumPy's float64, and what is trained and kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import ConfigError, PluginConflictError, SplitModel
from fedcore_fednh import PrototypeClassifier, smoothed_prototypes, uniform_prototypes
from fedcore_testing import (
    OwnsClassifier,
    StepsOnServer,
    client_arrays,
    federations,
    initial_weights,
    mean_by_hand,
    model_bytes,
    plugin_state,
    sgd_by_hand,
    small_config,
    weights,
)
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 4}
A, B, W, S = "encoder.base.1.weight", "encoder.base.1.bias", "classifier.weight", "classifier.scale"
go = federations()


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# --- the equations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (10, 10), (10, 64)])
def test_prototypes_start_orthonormal(classes, width):
    w = uniform_prototypes(classes, width).double().numpy()
    np.testing.assert_allclose(w @ w.T, np.eye(classes), atol=1e-6)


def test_logits_are_scaled_cosines():
    classifier = PrototypeClassifier(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), 5.0, learn=True)
    assert classifier(torch.tensor([[0.0, 1.0]])).tolist() == [[0.0, pytest.approx(4.0)]]


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9, 1.0])
def test_prototypes_move_as_in_numpy(rho):
    rng = np.random.default_rng(0)
    w, means, known = unit(rng.standard_normal((5, 7))), rng.standard_normal((5, 7)), np.array([1, 1, 0, 1, 0], bool)
    found = smoothed_prototypes(*map(torch.tensor, (w, means, known)), rho)
    expected = np.where(known[:, None], unit(rho * w + (1 - rho) * unit(means)), w)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# --- whole runs -------------------------------------------------------------------------------------------------


def small(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), 12, num_classes)


def features(w, x):
    h = x @ w[A].T + w[B]
    norm = np.linalg.norm(h, axis=1, keepdims=True)
    return h / norm, norm


def gradients(w, x, y):
    z, norm = features(w, x)
    logits = w[S] * z @ w[W].T
    p = np.exp(logits - logits.max(1, keepdims=True))
    error = (p / p.sum(1, keepdims=True) - y) / len(x)
    dz = w[S] * error @ w[W]
    dh = (dz - z * (dz * z).sum(1, keepdims=True)) / norm
    return {A: dh.T @ x, B: dh.sum(0), S: (error * (z @ w[W].T)).sum()}


@pytest.mark.parametrize("options", [{"rho": 0.6}, {"rho": 0.9, "scale": 3.0, "learn_scale": False}])
def test_a_run_is_the_method_in_numpy(go, tmp_path, options):
    """Two rounds of full batches with momentum and weight decay; clients lack classes."""
    run = {**SKEWED, "model": small, "local_epochs": 2, "batch_size": 5000, "lr": 0.1, "weight_decay": 1e-2}
    result = go({"fednh": options}, **run)
    start = initial_weights(small_config(tmp_path, ("fednh", options), **run))
    w = {S: options.get("scale", 20.0)} | {name: tensor.double().numpy() for name, tensor in start.items()}
    clients = client_arrays(result)
    trained = [A, B, *([S] if options.get("learn_scale", True) else [])]

    def of_trained(own, x, y):
        return {name: gradient for name, gradient in gradients(own, x, y).items() if name in trained}

    for _ in range(2):
        local, sums = [], np.zeros((10, 12))
        for x, y in clients:
            own = sgd_by_hand(of_trained, w, x, y, 2, lr=0.1)
            local.append(own)
            held = y.sum(0) > 0
            sums[held] += y.sum(0)[held, None] * unit((y.T @ features(own, x)[0])[held])
        counts = sum(y.sum(0) for _, y in clients)
        prototypes, held, rho = w[W].copy(), counts > 0, options["rho"]
        prototypes[held] = unit(rho * w[W][held] + (1 - rho) * unit(sums[held]))
        w = {**mean_by_hand(local, [len(x) for x, _ in clients]), W: prototypes}
    after = result.model.state_dict()
    for name in start:
        np.testing.assert_allclose(after[name], w[name], atol=3e-5, err_msg=name)


def test_prototypes_keep_their_length_and_nothing_else_is_kept(go):
    result = go("fednh", **SKEWED, rounds=3, participation=0.7)
    torch.testing.assert_close(weights(result)[W].norm(dim=1), torch.ones(10))
    assert plugin_state(result, "fednh") == {}


def test_rho_1_keeps_the_uniform_prototypes(go):
    w = weights(go({"fednh": {"rho": 1.0}}, **SKEWED))[W]
    torch.testing.assert_close(w @ w.T, torch.eye(10), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"rho": 0.5}, {"scale": 1.0}, {"learn_scale": False}]
    assert len({model_bytes(go({"fednh": change}, **SKEWED)) for change in changes}) == len(changes)


def test_features_narrower_than_the_classes_are_refused(go):
    def narrow(num_classes, input_shape):
        return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 4, num_classes)

    with raises(ConfigError, "4", "10"):
        go("fednh", model=narrow)


def test_a_fixed_scale_can_be_corrected_around(go):
    assert go({"fednh": {"learn_scale": False}}, "ccvr").metrics["global"]["accuracy"] > 0.1


@pytest.mark.parametrize("other", [OwnsClassifier, StepsOnServer])
def test_another_owner_or_server_optimizer_is_refused(go, other):
    with raises(PluginConflictError, "'fednh'", f"'{other.__name__.lower()}'"):
        go("fednh", other)


@pytest.mark.slow
def test_learns_digits(go):
    assert go("fednh", rounds=4, local_epochs=2, batch_size=16).metrics["global"]["accuracy"] > 0.6
