"""LG-FedAvg: the hand case, a run in NumPy, which layers stay, what travels, and how clients are evaluated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import ConfigError, PluginConflictError
from fedcore.models import mlp
from fedcore_lg_fedavg import LGFedAvg, local_names
from fedcore_testing import (
    Cohorts,
    PersonalClassifier,
    PersonalModel,
    Quadratic,
    W,
    analytic_federation,
    base_and_head,
    client_arrays,
    committed,
    federations,
    hidden_tanh,
    initial_weights,
    mean_by_hand,
    model_bytes,
    personal_state,
    records,
    same_tensors,
    sgd_by_hand,
    small_config,
    tanh_by_hand,
    weights,
)
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(**FEW)
TOY = {**analytic_federation([[1.0, 7.0], [3.0, -7.0]], [1, 3]), "model": base_and_head, "lr": 0.5}


def test_the_hand_case(go):
    """Representations 1 and 3 stay; heads 7 and -7 are averaged by samples 1 and 3. lr 1/2 goes half the way."""
    result = go(Quadratic, "lg-fedavg", **TOY, rounds=2)
    bases = [personal_state(result, client)[W].item() for client in (0, 1)]
    assert bases == pytest.approx([0.75, 2.25])  # half of 1 and of 3, then three quarters
    first = (3.5 - 3 * 3.5) / 4
    ends = (first + 7) / 2, (first - 7) / 2
    assert weights(result)["classifier.h"].item() == pytest.approx((ends[0] + 3 * ends[1]) / 4)
    by_plugin = committed(result).ledger["by_plugin"]["model"]
    assert by_plugin["up"] == by_plugin["down"] == 2 * 2 * 4, "one float per client and round, each way"


def test_a_run_is_the_algorithm_in_numpy(go, tmp_path):
    """Full batches, momentum, weight decay, clients that come and go."""
    cohorts = [[0, 1], [1, 2], [0, 2]]
    options = {**FEW, "model": hidden_tanh, "batch_size": 500, "lr": 0.2, "weight_decay": 1e-2}
    options |= {"clients": 3, "rounds": 3, "local_epochs": 2}
    result = go("lg-fedavg", (Cohorts, {"rounds": cohorts}), **options)
    w = {name: t.double().numpy() for name, t in initial_weights(small_config(tmp_path, **options)).items()}
    shared = {name: value for name, value in w.items() if name.startswith("classifier")}
    own = {k: {name: value for name, value in w.items() if name.startswith("encoder")} for k in range(3)}
    clients = client_arrays(result)
    for cohort in cohorts:
        ends = []
        for k in cohort:
            local = sgd_by_hand(tanh_by_hand, {**shared, **own[k]}, *clients[k], 2, lr=0.2)
            own[k] = {name: local[name] for name in own[k]}
            ends.append({name: local[name] for name in shared})
        shared = mean_by_hand(ends, [len(clients[k][0]) for k in cohort])
    for name, value in shared.items():
        np.testing.assert_allclose(weights(result)[name], value, atol=1e-5)
    for k in range(3):
        for name, value in own[k].items():
            np.testing.assert_allclose(personal_state(result, k)[name], value, atol=1e-5)


def test_the_local_layers_are_all_but_the_last_ones():
    model = mlp(10, (1, 8, 8))
    first, second = ([f"encoder.base.{layer}.{name}" for name in ("weight", "bias")] for layer in ("fc1", "fc2"))
    assert local_names(model, 1) == first + second
    assert local_names(model, 2) == first
    assert local_names(model, 3) == local_names(model, ["*"]) == []
    assert local_names(model, 0) == list(model.state_dict())
    assert local_names(model, ["*.bias", "classifier.*"]) == [first[0], second[0]]


def test_all_layers_shared_is_fedavg_to_the_bit(go):
    fedavg = go({}, participation=0.7, rounds=3)
    for shared in (LGFedAvg.neutral["shared"], 3):
        found = go(("lg-fedavg", {"shared": shared}), participation=0.7, rounds=3)
        assert model_bytes(found) == model_bytes(fedavg)
        assert [line["bytes"] for line in records(found)] == [line["bytes"] for line in records(fedavg)]


def test_no_layer_shared_is_solo(go):
    options = {"participation": 0.7, "clients": 4}
    solo, alone = go(PersonalModel, **options), go(("lg-fedavg", {"shared": 0}), **options)
    assert all(same_tensors(personal_state(alone, k), personal_state(solo, k)) for k in committed(solo).manifest)


def test_it_is_the_reverse_of_keeping_the_classifier(go):
    """The one shares what the other keeps."""
    head, rest = go(PersonalClassifier), go("lg-fedavg")
    assert sorted([*personal_state(head, 0), *personal_state(rest, 0)]) == sorted(weights(head))
    assert not torch.equal(*(personal_state(rest, k)["encoder.base.fc1.weight"] for k in (0, 1)))


def test_own_models_are_evaluated_and_there_is_no_global_one(go):
    result = go("lg-fedavg", client_test_fraction=0.3)
    assert result.metrics["global"] is None
    assert len(result.metrics["personal"]["per_client"]) == 3


@pytest.mark.parametrize("shared", [-1, [], 1.5], ids=str)
def test_neither_a_number_of_layers_nor_patterns_is_refused(go, shared):
    with raises(ConfigError, "'lg-fedavg'", "shared"):
        go(("lg-fedavg", {"shared": shared}))


def test_too_many_layers_and_patterns_without_a_match_are_refused(go):
    with raises(ConfigError, "fedavg.shared", "4", "3"):
        go(("lg-fedavg", {"shared": 4}))
    with raises(ConfigError, "'head.*'"):
        go(("lg-fedavg", {"shared": ["head.*"]}))


def test_another_plugin_that_keeps_parameters_is_refused(go):
    with raises(PluginConflictError):
        go("lg-fedavg", PersonalClassifier)
