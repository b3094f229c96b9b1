"""IFCA: estimates and means by hand, a whole federation against NumPy, k = 1, two groups of clients found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import ConfigError, Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore_ifca import IFCA, best_clusters, redrawn
from fedcore_testing import (
    Cohorts,
    PersonalClassifier,
    StepsOnServer,
    client_arrays,
    committed,
    federations,
    initial_weights,
    installed,
    linear,
    mean_by_hand,
    model_bytes,
    records,
    same_tensors,
    small_config,
    softmax_by_hand,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

go = federations(clients=4, samples=400)
FULL = {"model": linear, "batch_size": 5000, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "local_epochs": 2}


def two_groups(labels, num_clients, **_):
    """Even clients hold the digits below 5, odd ones the others."""
    low, high = np.flatnonzero(labels < 5), np.flatnonzero(labels >= 5)
    half = num_clients // 2
    return [part for pair in zip(np.array_split(low, half), np.array_split(high, half)) for part in pair]


def thetas(result):
    """theta_j by j, the global model first."""
    kept = {key: w for key, w in committed(result).plugins.get("ifca", {}).items() if ":" in key}
    count = 1 + max((int(key.partition(":")[0]) for key in kept), default=0)
    rest = [{k.partition(":")[2]: w for k, w in kept.items() if k.startswith(f"{j}:")} for j in range(1, count)]
    return [weights(result), *rest]


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [3.0, float("nan")])
def test_equal_clusters_are_the_best_and_a_diverged_one_is_not(first):
    assert best_clusters([first, 1.0, 1.0]) == [1, 2]
    assert best_clusters([first, first]) == ([0] if first != first else [0, 1])


def test_a_redrawn_tensor_has_the_same_values_in_another_order():
    tensor = torch.randn(6, 5)
    other = redrawn(tensor, torch.Generator().manual_seed(0))
    assert other.shape == tensor.shape
    assert not torch.equal(other, tensor)
    assert torch.equal(other.flatten().sort().values, tensor.flatten().sort().values)


# --- a whole federation ------------------------------------------------------------------------------------------


def test_a_run_is_the_method_in_numpy(go, tmp_path):
    options = {**FULL, "partition": two_groups, "rounds": 3}
    result = go({"ifca": {"clusters": 3}}, **options)
    still = thetas(go({"ifca": {"clusters": 3}}, **{**options, "rounds": 1, "lr": 1e-30}))
    clients = client_arrays(result)
    w = [{name: tensor.double().numpy() for name, tensor in theta.items()} for theta in still]
    for _ in range(3):
        members = [[] for _ in w]
        for x, y in clients:
            j = int(np.argmin([softmax_by_hand(theta, x, y)[0] for theta in w]))
            own = w[j]
            for _ in range(2):
                gradient = softmax_by_hand(own, x, y)[1]
                own = {name: own[name] - 0.1 * gradient[name] for name in own}
            members[j].append((len(x), own))
        for j, group in enumerate(members):
            if group:
                w[j] = mean_by_hand([own for _, own in group], [n for n, _ in group])
    for found, expected in zip(thetas(result), w, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_two_groups_of_clients_are_found_and_served(go):
    """Each group's clients estimate the same cluster, and their own models beat the one for all."""
    options = {"partition": two_groups, "rounds": 4, "client_test_fraction": 0.2, "local_epochs": 2}
    result, fedavg = go({"ifca": {}, Estimates: {}}, **options), go({}, **options)
    last = {client: cluster for round, client, cluster in SEEN if round == 3}
    assert last[0] == last[2] != last[1] == last[3]
    assert result.metrics["personal"]["accuracy"] > fedavg.metrics["global_local"]["accuracy"]


SEEN: list[tuple[int, int, int]] = []


class Estimates(Plugin):
    """Notes the clusters that clients send."""

    @hookimpl
    def guard_upload(self, client, update):
        SEEN.append((client.round, client.id, int(update.payload["ifca"]["cluster"])))


def test_of_models_that_are_the_same_function_each_client_draws_one(go):
    """Adapters start at 0: without the classifier all clients trained theta_0 in the first round."""
    SEEN.clear()
    plugins = {installed("lora"): {"classifier": False}, "ifca": {"clusters": 3}, Estimates: {}}
    go(plugins, clients=8, rounds=1, participation=1.0)
    assert {cluster for _, _, cluster in SEEN} == {0, 1, 2}


def test_the_report_counts_updates_and_a_note_names_clusters_without_any(go):
    """Clients with the same data find the same model the best."""
    with warns(RuntimeWarning, "ifca, round 2", "theta_"):
        result = go({"ifca": {"clusters": 3}}, partition="iid", rounds=2, samples=None)
    assert [sorted(record["reports"]["ifca"]["updates"]) for record in records(result)] == [[0, 0, 4], [0, 0, 8]]


def test_one_cluster_is_fedavg_with_batch_norms_buffers_too(go):
    settings = {"rounds": 2, "model": with_batch_norm}
    assert model_bytes(go({"ifca": IFCA.neutral}, **settings)) == model_bytes(go({}, **settings))


def test_a_cluster_without_clients_keeps_its_model(go, tmp_path):
    """One client can only be in one of three."""
    cohort = {Cohorts: {"rounds": [[0]]}}
    result = go({"ifca": {"clusters": 3}, **cohort}, rounds=1)
    start = initial_weights(small_config(tmp_path, rounds=1, clients=4))
    values = [{name: tensor.flatten().sort().values for name, tensor in theta.items()} for theta in thetas(result)]
    first = {name: tensor.flatten().sort().values for name, tensor in start.items()}
    assert sum(same_tensors(theta, first) for theta in values) == 2


@pytest.mark.slow
def test_the_option_changes_the_models(go):
    assert len({model_bytes(go({"ifca": {"clusters": k}}, partition=two_groups)) for k in (1, 2, 4)}) == 3


def test_all_k_models_go_down_and_one_comes_up(go):
    lines, fedavg = records(go({"ifca": {"clusters": 3}})), records(go({}))
    size = 4 * sum(tensor.numel() for tensor in go({}, rounds=1).model.state_dict().values())
    for line, plain in zip(lines, fedavg):
        assert line["bytes"]["down"] - plain["bytes"]["down"] == 4 * 2 * size
        assert line["bytes"]["up"] - plain["bytes"]["up"] == 4 * 8


class Lies(Plugin):
    """Client 1 sends what is no cluster."""

    sent = torch.tensor(0)

    @hookimpl
    def guard_upload(self, client, update):
        payload = {**update.payload, "ifca": {"cluster": Lies.sent}}
        return replace(update, payload=payload) if client.id == 1 else None


@pytest.mark.parametrize("system", [{"availability": 0.3}, {"dropout": 0.9}], ids=["nobody is there", "all drop out"])
def test_a_first_round_without_an_update_leaves_the_draw_to_the_next(go, system):
    result = go({"ifca": {"clusters": 3}}, rounds=5, system=system, min_clients=0, seed=3)
    accepted = [line["accepted"] for line in records(result)]
    assert accepted[0] == 0 < max(accepted)
    assert len(thetas(result)) == 3


def test_a_cluster_out_of_range_counts_as_the_nearest(go):
    """As local differential privacy's noise may make it."""
    found = []
    for sent in (1, 9):
        Lies.sent = torch.tensor(sent)
        found.append(model_bytes(go({"ifca": {}, Lies: {}}, rounds=1)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (StepsOnServer, "'stepsonserver'"),
        ("ditto", "personal_model"),
        *((other, f"'{other}'") for other in ("ccvr", "fedcme", "fedeccr", "fedgen", "fedproc", "fpl", "uscc")),
        *((other, f"'{other}'") for other in ("diagnostics", "dp", "norm-clip", "power-of-choice")),
    ],
)
def test_refused_beside_others_with_the_reason(go, other, named):
    with raises(PluginConflictError, "'ifca'", named):
        go({"ifca": {}, (installed(other) if isinstance(other, str) else other): {}})


def with_spectral_norm(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8)))
    return SplitModel(base, 8, num_classes)


def with_a_buffer_called_u(num_classes, input_shape):
    model = linear(num_classes, input_shape)
    model.encoder.register_buffer("level_u", torch.zeros(1))
    return model


def test_another_buffer_whose_name_ends_with_u_is_not_refused(go):
    assert records(go({"ifca": {}}, model=with_a_buffer_called_u, rounds=1))[0]["accepted"] == 4


def test_spectral_normalisation_is_refused_for_more_than_one_cluster(go):
    with raises(ConfigError, "'ifca'", "._u'"):
        go({"ifca": {}}, model=with_spectral_norm)
    one, fedavg = (
        weights(go(plugins, model=with_spectral_norm, samples=None)) for plugins in ({"ifca": {"clusters": 1}}, {})
    )
    torch.testing.assert_close(one, fedavg)  # the singular vectors are computed twice, to other last bits


def test_beside_a_method_that_keeps_parameters_the_clusters_have_the_others(go):
    alone, one = go({PersonalClassifier: {}}), go({"ifca": {"clusters": 1}, PersonalClassifier: {}})
    assert model_bytes(alone) == model_bytes(one)
    _, second = thetas(go({"ifca": {}, PersonalClassifier: {}}))
    assert second
    assert all(name.startswith("encoder.") for name in second)


class FrozenEncoder(Plugin):
    """What is frozen from the start does not travel."""

    @hookimpl
    def configure_model(self, model):
        model.encoder.requires_grad_(False)


def test_a_frozen_encoder_is_neither_kept_nor_sent(go):
    result = go({FrozenEncoder: {}, "ifca": {}}, rounds=3, model=with_batch_norm)
    assert {key.partition(":")[2] for key in committed(result).plugins["ifca"] if ":" in key} == {
        "classifier.weight",
        "classifier.bias",
    }
