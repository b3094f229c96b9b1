"""FedBuff: the hand case, whole federations against NumPy, staleness 0, how late clients are, what travels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedcore_fedbuff
from fedcore import Plugin, PluginConflictError, generator, hookimpl
from fedcore_testing import (
    Quadratic,
    RejectsRound1,
    StepsOnServer,
    W,
    analytic_federation,
    committed,
    federations,
    installed,
    interrupted,
    model_bytes,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

CENTRES, SIZES = np.array([[2.0, 0.0], [0.0, 4.0], [-3.0, 1.0], [1.0, -2.0]]), (1, 2, 3, 5)
TOY = {**analytic_federation(CENTRES, SIZES), "lr": 0.2, "local_epochs": 2}
go = federations(clients=4, samples=400)
STARTED: list[tuple[int, int, list[float]]] = []


def drawn(seed, round, client, most, distribution="uniform"):
    """tau_i, from the stream that the card names."""
    stream = generator(seed, "staleness", round=round, client=client)
    if distribution == "uniform":
        tau = int(torch.randint(most + 1, (), generator=stream))
    else:
        tau = int(torch.randn((), generator=stream).abs() * (most / 3) + 0.5)
    return min(tau, most, round)


# --- the equations -----------------------------------------------------------------------------------------------


def test_the_hand_case():
    """tau 3, so half of the movement (2, -4) counts, from (10, 10)."""
    w_t, start, y = torch.tensor([10.0, 10.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, -3.0])
    share = fedcore_fedbuff.discount(3, 0.5)
    assert fedcore_fedbuff.transplanted(w_t, start, y, share).tolist() == [11.0, 8.0]
    assert [fedcore_fedbuff.discount(tau, 0.5) for tau in (0, 1, 8)] == pytest.approx([1, 2**-0.5, 1 / 3])


def reference(records_, most, power, lr_s, distribution):
    """The whole federation in float64, as Algorithm 1 is printed, by samples."""
    history = [np.zeros(2)]
    for t, line in enumerate(records_):
        delta, n = np.zeros(2), 0
        for i in line["cohort"]:
            tau = drawn(0, t, i, most, distribution)
            start = history[t - tau]
            moved = (start - CENTRES[i]) * (1 - 0.2) ** 2 + CENTRES[i] - start
            delta, n = delta + SIZES[i] * (1 + tau) ** -power * moved, n + SIZES[i]
        history.append(history[t] + lr_s * delta / n)
    return history[-1]


@pytest.mark.parametrize(
    ("most", "power", "lr_s", "distribution"),
    [(3, 0.5, 1.0, "uniform"), (2, 0.0, 0.7, "uniform"), (6, 0.5, 1.0, "half-normal")],
)
def test_the_whole_federation_against_numpy(go, most, power, lr_s, distribution):
    options = {"staleness": most, "discount": power, "lr": lr_s, "distribution": distribution}
    result = go({Quadratic: {}, "fedbuff": options}, **TOY, rounds=8, participation=0.5)
    expected = reference(records(result), most, power, lr_s, distribution)
    np.testing.assert_allclose(weights(result)[W], expected, rtol=1e-5, atol=1e-5)
    late = [drawn(0, t, i, most, distribution) for t, line in enumerate(records(result)) for i in line["cohort"]]
    assert max(late) > 1
    assert 0 in late


# --- in the round loop -------------------------------------------------------------------------------------------


def test_the_first_round_is_fedavg_to_the_bit(go):
    """There is no older model yet."""
    assert model_bytes(go({"fedbuff": {}}, rounds=1)) == model_bytes(go({}, rounds=1))


class Started(Plugin):
    """Notes what every client starts from."""

    @hookimpl
    def local_loss(self, step):
        if step.client.steps == 0:
            STARTED.append((step.round, step.client.id, step.reference[0].double().tolist()))


def test_a_late_client_starts_from_the_model_of_so_many_rounds_ago(go):
    STARTED.clear()
    plugins = {Quadratic: {}, "fedbuff": {"staleness": 3}, Started: {}}
    go(plugins, **TOY, rounds=6)
    after = [[0.0, 0.0]]
    after += [weights(go(plugins, **TOY, rounds=rounds))[W].double().tolist() for rounds in (1, 2, 3, 4, 5)]
    noted = STARTED[:24]
    assert len(noted) == 24
    for round, client, start in noted:
        assert start == after[round - drawn(0, round, client, 3)]


def test_a_round_without_an_update_is_no_gap_among_the_older_models(go):
    STARTED.clear()
    plugins = {Quadratic: {}, "fedbuff": {"staleness": 3}, Started: {}, RejectsRound1: {}}
    options = {**TOY, "min_clients": 0}
    go(plugins, **options, rounds=6)
    noted = list(STARTED)
    after = [[0.0, 0.0]]
    after += [weights(go(plugins, **options, rounds=rounds))[W].double().tolist() for rounds in (1, 2, 3, 4, 5)]
    assert after[1] == after[2] != after[3]
    for round, client, start in noted:
        assert start == after[round - drawn(0, round, client, 3)]
    assert any(round - drawn(0, round, client, 3) == 1 for round, client, _ in noted)


CONCURRENT = {"rounds": 8, "participation": 0.5, "system": {"concurrency": 3, "slow": 0.5, "slow_factor": 6}}


@pytest.mark.slow
def test_with_concurrent_clients_staleness_is_the_simulated_systems(go):
    STARTED.clear()
    plugins = {Quadratic: {}, "fedbuff": {"staleness": 8}, Started: {}}
    lines = records(go(plugins, **TOY, **CONCURRENT))
    noted = list(STARTED)
    after = [[0.0, 0.0]]
    for rounds in range(1, 8):
        after.append(weights(go(plugins, **TOY, **{**CONCURRENT, "rounds": rounds}))[W].double().tolist())
    ages = {(line["round"], int(c)): tau for line in lines for c, tau in line["system"]["staleness"].items()}
    assert len(noted) == len(ages) == 16
    assert max(ages.values()) > 1
    for round, client, start in noted:
        assert start == after[round - ages[round, client]]


def test_what_is_older_than_the_models_that_are_kept_is_refused(go):
    result = go({"fedbuff": {"staleness": 1}}, clients=4, min_clients=0, **CONCURRENT)
    for line in records(result):
        old = {int(client) for client, tau in line["system"]["staleness"].items() if tau > 1}
        assert {failure["client"] for failure in line["failures"]} == old
        assert all("server steps old, more than fedbuff.staleness" in f["message"] for f in line["failures"])
    assert any(line["failures"] for line in records(result))


def test_a_concurrent_run_that_is_interrupted_goes_on_with_the_same_arrivals(go, tmp_path):
    options = {"clients": 6, "samples": 400, **CONCURRENT, "rounds": 4}
    resumed, straight = interrupted(tmp_path, "fedbuff", after=1, **options), go({"fedbuff": {}}, **options)
    assert model_bytes(resumed) == model_bytes(straight)
    assert [line["virtual_time"] for line in records(resumed)] == [line["virtual_time"] for line in records(straight)]


def test_models_of_several_rounds_survive_an_interruption(go, tmp_path):
    late, options = {"staleness": 2}, {"clients": 4, "samples": 400, "rounds": 4}
    resumed, straight = interrupted(tmp_path, ("fedbuff", late), after=1, **options), go({"fedbuff": late}, **options)
    assert model_bytes(resumed) == model_bytes(straight)


def test_the_last_models_are_kept_and_no_more(go):
    kept = committed(go({"fedbuff": {"staleness": 2}}, rounds=4)).plugins["fedbuff"]
    assert {key.partition(":")[0] for key in kept} == {"2", "3"}


def test_only_late_clients_get_a_second_model(go):
    result, plain = go({"fedbuff": {"staleness": 3}}, rounds=4), go({}, rounds=4)
    size = 4 * sum(tensor.numel() for tensor in weights(result).values())
    for t, (line, fedavg) in enumerate(zip(records(result), records(plain))):
        late = sum(drawn(0, t, client, 3) > 0 for client in line["cohort"])
        assert line["bytes"]["down"] - fedavg["bytes"]["down"] == late * size
        assert line["bytes"]["up"] == fedavg["bytes"]["up"]


def test_batch_norms_variance_stays_positive(go):
    """Buffers are the clients' as they are; moved like weights they could fall below 0."""
    result = go({"fedbuff": {"staleness": 4, "discount": 0.0}}, model=with_batch_norm, rounds=6)
    assert (weights(result)["encoder.base.norm.running_var"] > 0).all()


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"staleness": 1}, {"discount": 0.0}, {"lr": 0.5}, {"distribution": "half-normal"}]
    assert len({model_bytes(go({"fedbuff": change}, rounds=4)) for change in changes}) == len(changes)


def test_with_a_server_optimizer_as_the_paper_says_any_can_be_used(go):
    run = go({"fedbuff": {}, installed("fedadam"): {}}, rounds=3)
    assert model_bytes(run) != model_bytes(go({"fedadam": {}}, rounds=3))


def test_refused_beside_what_measures_movements_from_the_received_model(go):
    with raises(PluginConflictError):
        go({"fedbuff": {}, installed("scaffold"): {}})
    with raises(PluginConflictError):
        go({"fedbuff": {"lr": 0.5}, StepsOnServer: {}})


def test_refused_beside_an_exchange_after_which_movements_are_mixed(go):
    with raises(PluginConflictError, "'fedcme'"):
        go({"fedbuff": {}, installed("fedcme"): {}}, local_epochs=2)


@pytest.mark.parametrize(
    ("plugin", "options"), [("norm-clip", {"bound": 0.05}), ("dp", {"clip": 0.05, "noise_multiplier": 0.0})]
)
def test_clips_see_the_movement_from_the_present_model_in_any_order(go, plugin, options):
    """Else w_{t - tau} - w_t would be clipped with the client's movement, and come back as a movement of its own."""
    both = {"fedbuff": {"staleness": 2}, installed(plugin): options}
    reverse = dict(reversed(both.items()))
    assert model_bytes(go(both, rounds=4)) == model_bytes(go(reverse, rounds=4))


class FrozenEncoder(Plugin):
    """What is frozen from the start does not travel."""

    @hookimpl
    def configure_model(self, model):
        model.encoder.requires_grad_(False)


def test_a_frozen_encoder_is_neither_kept_nor_sent(go):
    result = go({FrozenEncoder: {}, "fedbuff": {"staleness": 2}}, rounds=3, model=with_batch_norm)
    assert {key.partition(":")[2] for key in committed(result).plugins["fedbuff"]} == {
        "classifier.weight",
        "classifier.bias",
    }
