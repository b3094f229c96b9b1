"""FedProto's distance and whole runs against NumPy; neutral options, absent clients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedcore import PluginConflictError
from fedcore_testing import (
    Cohorts,
    PersonalClassifier,
    client_arrays,
    federations,
    hidden_tanh,
    initial_weights,
    mean_by_hand,
    personal_state,
    plugin_state,
    sgd_by_hand,
    small_config,
    tanh_by_hand,
    weights,
)
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(**FEW)


def distance_by_hand(z, y, prototypes, known):
    """Return the distance of features z (B, d) and its gradient; y one-hot (B, C)."""
    away = (z - y @ np.where(known[:, None], prototypes, 0)) * (y @ known)[:, None]
    return (away**2).mean(), 2 * away / z.size


@pytest.mark.parametrize("personal", [True, False])
def test_a_run_is_the_method_in_numpy(go, tmp_path, personal):
    """Full batches, momentum, weight decay, clients that come and go and lack classes."""
    cohorts = [[0, 1], [1, 2], [0, 2]]
    options = {
        **FEW,
        "model": hidden_tanh,
        "batch_size": 500,
        "lr": 0.2,
        "weight_decay": 1e-2,
        "clients": 3,
        "rounds": 3,
    }
    options |= {"partition": "classes", "classes_per_client": 4, "local_epochs": 2}
    result = go(("fedproto", {"lambda": 2.0, "personal": personal}), (Cohorts, {"rounds": cohorts}), **options)
    w = {name: t.double().numpy() for name, t in initial_weights(small_config(tmp_path, **options)).items()}
    own: dict[int, dict[str, np.ndarray]] = {}
    prototypes, known = np.zeros((10, 6)), np.zeros(10, dtype=bool)
    clients = client_arrays(result)

    def features(model, x):
        return np.tanh(x @ model["encoder.base.1.weight"].T + model["encoder.base.1.bias"])

    def gradient(model, x, y):
        return tanh_by_hand(model, x, y, lambda z: 2.0 * distance_by_hand(z, y, prototypes, known)[1])

    for cohort in cohorts:
        sums, holders, ends = np.zeros((10, 6)), np.zeros(10), []
        for k in cohort:
            x, y = clients[k]
            local = sgd_by_hand(gradient, own.get(k, w) if personal else w, x, y, 2, lr=0.2)
            own[k], count = local, y.sum(0)
            ends.append(local)
            sums += y.T @ features(local, x) / np.maximum(count, 1)[:, None]
            holders += count > 0
        prototypes = np.where((holders > 0)[:, None], sums / np.maximum(holders, 1)[:, None], prototypes)
        known |= holders > 0
        if not personal:
            w = mean_by_hand(ends, [len(clients[k][0]) for k in cohort])
    state = plugin_state(result, "fedproto")
    np.testing.assert_array_equal(state["known"], known)
    np.testing.assert_allclose(state["prototypes"], prototypes, atol=2e-5)
    for k in range(3) if personal else ():
        for name, value in own[k].items():
            np.testing.assert_allclose(personal_state(result, k)[name], value, atol=2e-5)
    for name, value in w.items():
        np.testing.assert_allclose(weights(result)[name], value, atol=2e-5)


def test_the_classifier_or_the_nearest_prototype_predicts(go):
    options = {"client_test_fraction": 0.3, "rounds": 3}
    found = [go(("fedproto", {"nearest": nearest}), **options).metrics["personal_global"] for nearest in (True, False)]
    assert found[0]["accuracy"] != found[1]["accuracy"]


def test_another_plugin_that_keeps_parameters_is_refused(go):
    with raises(PluginConflictError, "'personalclassifier'", "'fedproto'"):
        go("fedproto", PersonalClassifier)
