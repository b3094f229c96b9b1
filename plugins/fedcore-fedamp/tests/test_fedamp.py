"""FedAMP: shares and mixtures by hand, a whole federation against NumPy, lambda 0, what travels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import PluginConflictError
from fedcore_fedamp import FedAMP, FedAMPOptions, cosine, cosine_attention, mixture, squared_distance
from fedcore_testing import (
    Cohorts,
    Quadratic,
    W,
    analytic_federation,
    committed,
    federations,
    installed,
    personal_state,
    records,
    same_tensors,
    with_batch_norm,
)
from fedcore_testing.problems import with_fixed_layers
from tests.sentences import raises

CENTRES = [[2.0, 0.0], [2.5, 0.5], [0.0, 4.0], [-3.0, 1.0]]
TOY = {**analytic_federation(CENTRES), "lr": 0.2, "local_epochs": 3}
SKEWED = {"clients": 4, "partition": "classes", "classes_per_client": 3, "client_test_fraction": 0.2}
go = federations(clients=4)


def own_models(result, clients=4):
    return [personal_state(result, client) for client in range(clients)]


# --- the equations -----------------------------------------------------------------------------------------------


def test_distance_cosine_and_mixture_by_hand():
    one, other = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(0.0)}, {"a": torch.zeros(2), "b": torch.tensor(4.0)}
    assert squared_distance(one, other) == 25.0
    assert cosine(one, other) == 0.0
    assert cosine(one, {name: 7 * tensor for name, tensor in one.items()}) == pytest.approx(1.0)
    assert cosine(one, {name: 0 * tensor for name, tensor in one.items()}) == 0.0
    mixed = mixture(one, [other], [0.25])
    assert (mixed["a"].tolist(), mixed["b"].item()) == ([2.25, 0.0], 1.0)


@pytest.mark.parametrize("options", [{"alpha": 0.5, "sigma": 2.0}, {"alpha": 50.0, "sigma": 2.0}])
def test_shares_against_numpy(options):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 3))
    distances = ((w[1:] - w[0]) ** 2).sum(1)
    expected = options["alpha"] * np.exp(-distances / options["sigma"]) / options["sigma"]
    expected /= max(1.0, expected.sum())
    models = [{"w": torch.tensor(row)} for row in w]
    found = FedAMP(FedAMPOptions(**options)).shares(models[0], models[1:])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert sum(found) <= 1 + 1e-12


def test_the_message_is_a_gradient_step_on_the_sum_of_A():
    """u_i = w_i - alpha d/dw_i sum_j A(|w_i - w_j|^2) / 2, which is how the paper derives the shares."""
    w = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w_0 = w[0].clone().requires_grad_()
    total = (1 - torch.exp(-(w_0 - w[1:]).square().sum(1) / 5.0)).sum()
    total.backward()
    models = [{"w": row} for row in w]
    shares = FedAMP(FedAMPOptions(alpha=0.7, sigma=5.0)).shares(models[0], models[1:])
    torch.testing.assert_close(mixture(models[0], models[1:], shares)["w"], w[0] - 0.7 * w_0.grad / 2)


def test_the_heuristics_shares_sum_to_one_and_prefer_what_resembles():
    shares = cosine_attention([0.9, 0.1, -0.5], 10.0, 0.3)
    assert sum(shares) == pytest.approx(0.7)
    assert shares[0] > 0.69
    assert cosine_attention([], 10.0, 0.3) == []


# --- a whole federation ------------------------------------------------------------------------------------------


def reference(rounds, strength, alpha, sigma, cohorts=None):
    """All w_i in float64: u_i from the models as the round begins, then plain SGD from w_i."""
    centres = np.array(CENTRES)
    w, known = np.zeros_like(centres), set()
    for cohort in cohorts or [range(4)] * rounds:
        new = w.copy()
        for i in cohort:
            u = w[i].copy()
            if i in known:
                others = [j for j in sorted(known) if j != i]
                xi = [alpha / sigma * np.exp(-((w[i] - w[j]) ** 2).sum() / sigma) for j in others]
                xi = [x / max(1.0, sum(xi)) for x in xi]
                u = (1 - sum(xi)) * w[i] + sum((x * w[j] for x, j in zip(xi, others)), np.zeros(2))
            for _ in range(3):
                new[i] = new[i] - 0.2 * (new[i] - centres[i] + strength / alpha * (new[i] - u))
        w = new
        known |= set(cohort)
    return w


@pytest.mark.parametrize(("strength", "alpha", "sigma"), [(1.0, 1.0, 10.0), (3.0, 2.0, 1.5), (0.0, 1.0, 10.0)])
def test_the_whole_federation_against_numpy(go, strength, alpha, sigma):
    options = {"lambda": strength, "alpha": alpha, "sigma": sigma}
    result = go({Quadratic: {}, "fedamp": options}, **TOY, rounds=4)
    found = np.array([model[W].double().numpy() for model in own_models(result)])
    np.testing.assert_allclose(found, reference(4, strength, alpha, sigma), rtol=1e-5, atol=1e-6)


def test_clients_that_come_late_are_mixed_from_their_second_round_on(go):
    cohorts = [[0, 1], [1, 2], [0, 2, 3], [0, 1, 2, 3]]
    result = go({Quadratic: {}, "fedamp": {}, Cohorts: {"rounds": cohorts}}, **TOY, rounds=4)
    found = np.array([model[W].double().numpy() for model in own_models(result)])
    np.testing.assert_allclose(found, reference(4, 1.0, 1.0, 10.0, cohorts), rtol=1e-5, atol=1e-6)


def test_lambda_0_is_solo_to_the_bit(go):
    alone, fedamp = go({installed("solo"): {}}, **SKEWED), go({"fedamp": {"lambda": 0.0}}, **SKEWED)
    assert all(same_tensors(one, other) for one, other in zip(own_models(alone), own_models(fedamp)))
    assert [line["losses"] for line in records(alone)] == [line["losses"] for line in records(fedamp)]
    assert alone.metrics["personal"] == fedamp.metrics["personal"]


@pytest.mark.slow
def test_every_option_changes_the_models(go):
    changes = [{}, {"lambda": 0.1}, {"alpha": 0.3}, {"sigma": 1.0}, {"attention": "cosine"}]
    changes.append({"attention": "cosine", "self_weight": 0.1})
    found = [own_models(go({"fedamp": change}, **SKEWED)) for change in changes]
    for i, one in enumerate(found):
        assert not any(all(same_tensors(a, b) for a, b in zip(one, other)) for other in found[:i])


def test_a_client_is_sent_one_mixture_when_it_trains_and_nothing_in_evaluation(go):
    """Round 0 has nothing to mix; then down is one model for each client, as is up."""
    lines = records(go({"fedamp": {}}, **SKEWED, rounds=3))
    size = 4 * sum(tensor.numel() for tensor in go({}, rounds=1).model.state_dict().values())
    down = [line["bytes"]["by_plugin"]["fedamp"]["down"] for line in lines]
    assert down == [0, 4 * size, 4 * size]
    assert [line["bytes"]["by_plugin"]["fedamp"]["up"] for line in lines] == [4 * size] * 3
    assert lines[0]["bytes"]["by_plugin"].get("model", {"up": 0})["up"] == 0, "the core sends no model"


def test_batch_norms_statistics_stay_with_the_client(go):
    result = go({"fedamp": {}}, model=with_batch_norm, rounds=2)
    means = [model["encoder.base.norm.running_mean"] for model in own_models(result)]
    assert not torch.equal(means[0], means[1])


def test_the_server_keeps_the_models_that_clients_have(go):
    result = go({"fedamp": {}}, **SKEWED)
    kept = committed(result).plugins["fedamp"]
    for client, model in enumerate(own_models(result)):
        assert all(torch.equal(kept[f"{client}:{name}"], tensor) for name, tensor in model.items())


def test_what_nobody_trains_neither_travels_nor_counts(go):
    """A frozen encoder is the same in all models: it would bring all cosines near 1."""
    result = go({"fedamp": {"attention": "cosine"}}, **SKEWED, model=with_fixed_layers, rounds=2)
    kept = committed(result).plugins["fedamp"]
    own = [{key.partition(":")[2] for key in kept if key.startswith(f"{client}:")} for client in range(4)]
    assert own == [{*personal_state(result, client)} for client in range(4)]
    assert not any("backbone" in name for name in own[0])
    assert own[0]


def test_another_keeper_of_parameters_is_refused(go):
    with raises(PluginConflictError, "'fedper'", "'fedamp'"):
        go({"fedamp": {}, installed("fedper"): {}})
