"""The rules for clients that differ: by hand, against NumPy, against byzfl, and in whole runs."""

from __future__ import annotations

import importlib.util
import sys
import types

import numpy as np
import pytest
import torch

from fedcore import DivergedError, Plugin, hookimpl
from fedcore_robust import (
    FLTrust,
    GeometricMedianOptions,
    bucket_weights,
    bulyan_selection,
    centred_clipping,
    geometric_median,
    mean_around_median,
    neighbour_weights,
    squared_distances,
    trusted_mean,
)
from fedcore_testing import (
    federations,
    initial_weights,
    model_bytes,
    records,
    weights,
    with_batch_norm,
)
from fedcore_testing.problems import with_fixed_layers
from tests.sentences import raises, warns

go = federations(clients=8, rounds=2, participation=1.0, local_epochs=1, batch_size=64)
NEW = ["centred-clip", "geometric-median", "bulyan", "fltrust"]
ALL = ["median", "trimmed-mean", "krum", *NEW]
PUBLIC = {"public": "0.05"}


def drawn(seed: int, n: int = 9, d: int = 6) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- byzfl is an independent implementation ------------------------------------------------------------------


@pytest.fixture(scope="module")
def byzfl():
    """byzfl's aggregators. Its package imports torchvision and a benchmark, which these do not need."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed")
    if "byzfl" not in sys.modules:
        bare = types.ModuleType("byzfl")
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules["byzfl"] = bare
    from byzfl.aggregators import aggregators, preaggregators

    return types.SimpleNamespace(**{**vars(aggregators), **vars(preaggregators)})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("f", [0, 1, 3])
def test_neighbour_mixing_is_byzfls(byzfl, seed, f):
    vectors = drawn(seed)
    found = neighbour_weights(squared_distances([vectors]), f) @ vectors
    np.testing.assert_allclose(found, byzfl.NNM(f)(vectors.numpy()), rtol=1e-9)


@pytest.mark.parametrize(("n", "size"), [(9, 2), (8, 2), (7, 3), (4, 1)])
def test_buckets_are_byzfls(byzfl, monkeypatch, n, size):
    vectors, order = drawn(3, n), torch.randperm(n, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(np.random, "permutation", lambda values: values[order.numpy()])
    np.testing.assert_allclose(bucket_weights(order, size) @ vectors, byzfl.Bucketing(size)(vectors.numpy()), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("radius", [0.5, 2.0, 100.0])
def test_centred_clipping_is_byzfls_over_rounds(byzfl, seed, radius):
    oracle, centre = byzfl.CenteredClipping(L=3, tau=radius), torch.zeros(6, dtype=torch.float64)
    for number in range(3):
        vectors = drawn(10 * seed + number)
        centre = centred_clipping(vectors, centre, radius, 3)
        np.testing.assert_allclose(centre, oracle(vectors.numpy()), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_geometric_median_is_byzfls(byzfl, seed):
    """byzfl starts from 0 and this from the coordinate median; both are the one minimum after many steps."""
    vectors = drawn(seed)
    expected = byzfl.GeometricMedian(nu=1e-9, T=2000)(vectors.numpy())
    np.testing.assert_allclose(geometric_median(vectors, 1e-9, 2000), expected, atol=1e-5)


@pytest.mark.parametrize(("n", "d"), [(3, 10), (9, 6), (10, 50), (21, 6), (51, 10)])
@pytest.mark.parametrize("length", [100.0, 1e8])
def test_the_default_steps_find_the_geometric_median_of_all_minorities(n, d, length):
    """The reference is NumPy's, 20,000 steps from the mean of the honest vectors, which no attacker moves."""
    vectors, attackers = drawn(n, n, d), (n - 1) // 2
    vectors[:attackers] *= length / vectors[0].norm()
    vectors[:attackers] = vectors[0]
    values, expected = vectors.numpy(), vectors[attackers:].mean(dim=0).numpy()
    for _ in range(20_000):
        weights = 1 / np.linalg.norm(values - expected, axis=1)
        expected = weights @ values / weights.sum()
    options = GeometricMedianOptions()
    found = geometric_median(vectors, options.smoothing, options.iterations)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.linalg.norm(values - expected, axis=1).min())


def test_the_geometric_median_leaves_a_vector_at_which_it_starts():
    """The coordinate median is the vector (0, 0), whose pull of 1 is less than the other two's."""
    vectors = torch.tensor([[-10.0, -1.0], [0.0, 0.0], [1.0, 10.0]], dtype=torch.float64)
    found = geometric_median(vectors, 1e-6, 500)
    towards = (vectors - found) / (vectors - found).norm(dim=1, keepdim=True)
    assert towards.sum(dim=0).norm() < 1e-4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("f", [0, 2, 4])
def test_the_mean_around_the_median_is_byzfls(byzfl, seed, f):
    vectors = drawn(seed)
    np.testing.assert_allclose(mean_around_median(vectors, 9 - f), byzfl.Meamed(f)(vectors.numpy()), rtol=1e-9)


# --- by hand -------------------------------------------------------------------------------------------------


def test_bulyan_leaves_out_what_krum_would():
    points = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 900.0, 5.0])
    assert 5 not in bulyan_selection((points[:, None] - points).square(), 1)
    assert len(bulyan_selection(squared_distances([drawn(1, 11)]), 2)) == 7


def test_trusted_mean_by_hand():
    """Cosines 1, 0.6, -1 to (2, 0); rows at length 2: (2, 0) and (1.2, 1.6)."""
    updates = torch.tensor([[5.0, 0.0], [3.0, 4.0], [-7.0, 0.0]], dtype=torch.float64)
    found = trusted_mean(updates, torch.tensor([2.0, 0.0], dtype=torch.float64))
    np.testing.assert_allclose(found, [(2 + 0.6 * 1.2) / 1.6, 0.6 * 1.6 / 1.6])
    assert trusted_mean(-updates[:1], updates[0]).tolist() == [0, 0]
    assert trusted_mean(updates * 0, updates[0]).tolist() == [0, 0]


@pytest.mark.parametrize("rule", [
    lambda v: geometric_median(v, 1e-6, 50),
    lambda v: centred_clipping(v, torch.zeros(6, dtype=torch.float64), 3.0, 5),
    lambda v: mean_around_median(v, 5),
    lambda v: trusted_mean(v, v[5]),
])  # fmt: skip
def test_a_far_minority_moves_a_rule_little(rule):
    vectors = 1 + 0.1 * drawn(4)
    vectors[:2] = 1e6
    assert rule(vectors).sub(1).abs().max() < 2


# --- whole runs ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:.*outvote")  # eight clients are few for Bulyan
@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("before", ["bucketing", "nnm"])
def test_every_rule_with_every_mixing_trains_and_repeats_its_bits(go, rule, before):
    run = lambda: go({rule: {"before": before}}, model=with_batch_norm, **PUBLIC)  # noqa: E731
    first = run()
    assert all(torch.isfinite(tensor).all() for tensor in weights(first).values())
    assert records(first)[-1]["accepted"] == 8
    if rule in ("krum", "centred-clip"):
        assert model_bytes(first) == model_bytes(run())
    assert model_bytes(first) != model_bytes(go({rule: {}}, model=with_batch_norm, **PUBLIC))


def test_mixing_that_mixes_nothing_is_the_rule(go):
    plain = model_bytes(go({"median": {}}))
    assert model_bytes(go({"median": {"before": "bucketing", "bucket": 1}})) == plain


def test_a_wide_radius_is_the_mean_of_the_clients(go):
    clipped = weights(go({"centred-clip": {"radius": 1e9, "iterations": 1}}, rounds=1, partition="iid"))
    trimmed = weights(go({"trimmed-mean": {"fraction": 0}}, rounds=1, partition="iid"))
    for name, tensor in clipped.items():
        torch.testing.assert_close(tensor, trimmed[name])


def test_fltrusts_root_training_takes_the_clients_steps_and_clips_as_they_do(go):
    """One step of at most lr C: the model moves by the root update's length at most. A pass would be two steps."""
    work = {"local_steps": 1, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.5}
    result = go({"fltrust": {}}, **work, rounds=1, partition="iid", **PUBLIC)
    start = initial_weights(result.config)
    moved = torch.cat([(tensor - start[name]).flatten() for name, tensor in weights(result).items()]).norm()
    assert 0.02 < moved < 0.1 * 0.5 + 1e-6


def test_fltrusts_root_training_leaves_out_a_batch_on_which_batch_norm_cannot_train(go):
    """Of 65 public samples one is left for the second batch."""
    result = go({"fltrust": {}}, model=with_batch_norm, public="0.045", batch_size=64)
    assert records(result)[-1]["accepted"] == 8


def test_fltrusts_root_training_leaves_frozen_batch_norm_in_eval_mode(go, monkeypatch):
    trained, seen = FLTrust.trained, []
    monkeypatch.setattr(FLTrust, "trained", lambda self, server: seen.append(trained(self, server)) or seen[-1])
    go({"fltrust": {}}, model=with_fixed_layers, rounds=1, **PUBLIC)
    assert seen[0]["encoder.base.backbone.2.num_batches_tracked"] == 0


class FreezesTheClassifier(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"])


def test_fltrusts_root_training_leaves_what_clients_froze(go, monkeypatch):
    """Next to FedBABU half of the root update's length was of the head, and the body's step 17 % too long."""
    trained, seen = FLTrust.trained, []
    monkeypatch.setattr(FLTrust, "trained", lambda self, server: seen.append(trained(self, server)) or seen[-1])
    result = go({"fltrust": {}, FreezesTheClassifier: {}}, rounds=1, **PUBLIC)
    start = initial_weights(result.config)
    assert {name for name in start if torch.equal(seen[0][name], start[name])} == {
        "classifier.weight",
        "classifier.bias",
    }


def test_fltrust_says_that_its_root_training_diverged(go, monkeypatch):
    diverged = lambda self, server: {name: tensor * torch.nan for name, tensor in server.model.items()}  # noqa: E731
    monkeypatch.setattr(FLTrust, "trained", diverged)
    with raises(DivergedError, "--public"):
        go({"fltrust": {}}, rounds=1, **PUBLIC)


def test_fltrust_says_that_it_trusts_nobody(go):
    pytest.importorskip("fedcore_attacks")
    attack = {"kind": "sign-flip", "clients": list(range(8))}
    with warns(RuntimeWarning, "fltrust, round 1"):
        go({"attack": attack, "fltrust": {}}, rounds=1, partition="iid", **PUBLIC)


@pytest.mark.parametrize("rule", ["geometric-median", "centred-clip"])
@pytest.mark.parametrize("before", ["none", "bucketing", "nnm"])
def test_a_parameter_that_is_one_number_counts(go, rule, before):
    """FedETF's temperature is one."""
    pytest.importorskip("fedcore_fedetf")
    assert records(go({rule: {"before": before}, "fedetf": {}}, rounds=1))[-1]["accepted"] > 0
