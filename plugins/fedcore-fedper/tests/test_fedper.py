"""FedPer: the hand case, which layers are personal, what travels, and with which head a client is evaluated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import ConfigError, Plugin, PluginConflictError, PluginContractError, SplitModel, hookimpl
from fedcore.client import evaluate
from fedcore.data import load_dataset
from fedcore_functional import proximal_term
from fedcore_testing import (
    Cohorts,
    CorrectsClassifier,
    OwnsClassifier,
    PersonalModel,
    Quadratic,
    W,
    analytic_federation,
    base_and_head,
    client_arrays,
    committed,
    federations,
    hidden_tanh,
    mean_by_hand,
    model_bytes,
    partition_of,
    personal_state,
    same_tensors,
    sgd_by_hand,
    steps_without_host_sync,
    tanh_by_hand,
    weights,
)
from tests.sentences import raises

go = federations(samples=300)


# --- the hand case -----------------------------------------------------------------------------------------------


TOY = {
    **analytic_federation([[1.0, 7.0], [3.0, -7.0]], [1, 3]),
    "model": base_and_head,
    "lr": 1.0,
}  # bases 1 and 3, heads 7, -7


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_hand_case(go, rounds):
    result = go({Quadratic: {}, "fedper": {}}, **TOY, rounds=rounds)
    assert weights(result)[W].tolist() == [2.5]
    assert weights(result)["classifier.h"].tolist() == [0.0], "the initial one"
    assert personal_state(result, 0)["classifier.h"].tolist() == [7.0]
    assert personal_state(result, 1)["classifier.h"].tolist() == pytest.approx([-7.0])
    by_plugin = committed(result).ledger["by_plugin"]["model"]
    assert by_plugin["up"] == by_plugin["down"] == 2 * rounds * 4, "one float per client and round, each way"


def test_a_round_goes_on_from_the_own_head_and_the_averaged_base(go):
    """lr 1/2: heads are halfway, then three quarters there; bases start from the mean 1.25 in the second round."""
    result = go({Quadratic: {}, "fedper": {}}, **{**TOY, "lr": 0.5})
    assert personal_state(result, 0)["classifier.h"].tolist() == [5.25]
    assert personal_state(result, 1)["classifier.h"].tolist() == pytest.approx([-5.25])
    assert weights(result)[W].tolist() == pytest.approx([((1.25 + 1) / 2 + 3 * (1.25 + 3) / 2) / 4])


# --- a run computed independently --------------------------------------------------------------------------------


def test_a_run_is_the_algorithm_in_numpy(go):
    """Full batches, momentum, weight decay, clients that come and go: Algorithms FEDPER-CLIENT and FEDPER-SERVER."""
    cohorts = [[0, 1], [1, 2], [0, 2]]
    options = {"model": hidden_tanh, "batch_size": 5000, "lr": 0.1, "weight_decay": 1e-2}
    result = go({"fedper": {}, Cohorts: {"rounds": cohorts}}, **options, rounds=3, local_epochs=3)
    start = go({"fedper": {"personal": 0}}, **{**options, "lr": 1e-30, "weight_decay": 0.0}, rounds=1)
    clients = client_arrays(result)

    w = {name: tensor.double().numpy() for name, tensor in weights(start).items()}
    base = {name: value for name, value in w.items() if name.startswith("encoder")}
    own = {k: {name: value for name, value in w.items() if name.startswith("classifier")} for k in range(3)}
    for cohort in cohorts:
        bases = []
        for k in cohort:
            local = sgd_by_hand(tanh_by_hand, {**base, **own[k]}, *clients[k], 3, lr=0.1)
            own[k] = {name: local[name] for name in own[k]}
            bases.append({name: local[name] for name in base})
        base = mean_by_hand(bases, [len(clients[k][0]) for k in cohort])
    for name, value in base.items():
        np.testing.assert_allclose(weights(result)[name], value, atol=1e-5)
    for k in range(3):
        for name, value in own[k].items():
            np.testing.assert_allclose(personal_state(result, k)[name], value, atol=1e-5)
    assert np.abs(own[0]["classifier.weight"] - own[1]["classifier.weight"]).max() > 1e-2


# --- identities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("personal", [["*"], 3], ids=str)
def test_the_whole_model_is_solo(go, personal):
    options = {"rounds": 3, "participation": 0.7, "clients": 4, "client_test_fraction": 0.2}
    solo, fedper = go({PersonalModel: {}}, **options), go({"fedper": {"personal": personal}}, **options)
    took_part = list(committed(solo).manifest)
    assert took_part
    assert all(same_tensors(personal_state(fedper, client), personal_state(solo, client)) for client in took_part)
    assert fedper.metrics["personal"] == solo.metrics["personal"]
    assert committed(fedper).ledger["up"] == 0


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"personal": 0}, {"personal": 2}, {"personal": ["*.bias"]}]
    found = [model_bytes(go({"fedper": change})) for change in changes]
    assert len(set(found)) == len(changes)
    assert found[0] == model_bytes(go({"fedper": {"personal": ["classifier.*"]}}))


# --- buffers, absence, resume ------------------------------------------------------------------------------------


def normalised(num_classes, input_shape):
    base = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.PReLU()
    )
    return SplitModel(base, 8, num_classes)


def test_statistics_of_the_base_are_averaged_and_those_of_personal_layers_stay(go):
    shared, kept = (
        go({"fedper": {}}, model=normalised),
        go({"fedper": {"personal": ["*.3.*", "classifier.*"]}}, model=normalised),
    )
    name = "encoder.base.3.running_mean"
    assert name not in personal_state(shared, 0)
    assert (weights(shared)[name] != 0).any()
    assert (weights(kept)[name] == 0).all()
    assert not torch.equal(personal_state(kept, 0)[name], personal_state(kept, 1)[name])
    assert personal_state(kept, 0)["encoder.base.3.num_batches_tracked"] > 0


def test_a_client_keeps_its_head_over_rounds_of_absence_and_goes_on_from_it(go):
    cohorts = {"rounds": [[0, 1], [1], [1], [0]]}
    found = {r: go({"fedper": {}, Cohorts: cohorts}, rounds=r, lr=0.01) for r in (1, 3, 4)}
    assert same_tensors(personal_state(found[3], 0), personal_state(found[1], 0))
    assert not same_tensors(weights(found[3]), weights(found[1]))
    start = weights(found[1])["classifier.weight"]
    distances = [(personal_state(found[r], 0)["classifier.weight"] - start).norm() for r in (1, 4)]
    assert distances[1] > 1.2 * distances[0]
    assert 2 not in committed(found[4]).manifest


# --- evaluation --------------------------------------------------------------------------------------------------


def test_clients_are_evaluated_with_their_latest_head_on_the_averaged_base(go):
    """Client 0 was in the last round, client 1 before, client 2 never: it has the initial head."""
    result = go(
        {"fedper": {}, Cohorts: {"rounds": [[0, 1], [0, 1], [0]]}},
        rounds=3,
        local_epochs=3,
        client_test_fraction=0.3,
    )
    data = load_dataset("digits", None)
    parts = partition_of(result).test
    hits, totals, on_test = 0, 0, []
    for client, part in enumerate(parts):
        model = result.model
        model.load_state_dict({**weights(result), **(personal_state(result, client) if client < 2 else {})})
        counts = evaluate(model, data.train, 10, torch.device("cpu"), indices=part)
        hits, totals = hits + int(counts.correct.sum()), totals + int(counts.total.sum())
        on_test.append(evaluate(model, data.test, 10, torch.device("cpu")).rates()["accuracy"])
    metrics = result.summary["metrics"]
    assert metrics["personal"]["accuracy"] == pytest.approx(hits / totals, abs=1e-12)
    assert metrics["personal"]["untrained"] == 1
    assert metrics["personal_global"]["accuracy"] == pytest.approx(np.mean(on_test), abs=1e-12)
    assert metrics["personal_global"]["std"] == pytest.approx(np.std(on_test), abs=1e-12)
    assert metrics["global"] is None
    assert "'classifier.bias'" in metrics["global_reason"]
    assert "global_local" not in metrics


# --- beside other plugins ----------------------------------------------------------------------------------------


class Proximal(Plugin):
    @hookimpl
    def local_loss(self, step):
        SHAPES.append([tuple(parameter.shape) for parameter in step.parameters])
        return fedcore.Loss(proximal_term(step.parameters, step.reference), weight=0.1)


SHAPES: list[list[tuple[int, ...]]] = []


def test_terms_on_shared_parameters_act_on_the_base(go):
    SHAPES.clear()
    result = go({"fedper": {}, Proximal: {}})
    assert SHAPES[0] == [(128, 64), (128,), (64, 128), (64,)]
    assert model_bytes(result) != model_bytes(go({"fedper": {}}))


def test_a_step_does_not_wait_for_the_device(go):
    with steps_without_host_sync() as looked:
        go({"fedper": {}}, rounds=1)
    assert looked
    assert not any(looked)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PersonalModel, ("'fedper'", "'personalmodel'")),
        (OwnsClassifier, ("'ownsclassifier'", "'fedper'")),
        (
            CorrectsClassifier,
            ("'correctsclassifier'", "'fedper'"),
        ),
    ],
)
def test_another_owner_of_the_personal_layers_is_refused(go, other, named):
    with raises(PluginConflictError, *named):
        go({"fedper": {}, other: {}})


@pytest.mark.parametrize("options", [{"personal": -1}, {"personal": []}, {"personal": 1.5}], ids=str)
def test_neither_a_number_of_layers_nor_patterns_is_refused(go, options):
    with raises(ConfigError, "'fedper'", *options):
        go({"fedper": options})


def test_too_many_layers_and_patterns_without_a_match_are_refused(go):
    with raises(ConfigError, "3"):
        go({"fedper": {"personal": 4}})
    with raises(PluginContractError, "'head.*'"):
        go({"fedper": {"personal": ["head.*"]}})
