"""Hand cases through the real round loop, and the identities between methods."""

from __future__ import annotations

import pytest
import torch

from fedcore_testing import W
from tests.support import model_bytes, run, weights


def near(tensor, values, tolerance=1e-6):
    torch.testing.assert_close(tensor, torch.tensor(values), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("steps", "expected"), [(1, 1.09), (2, 1.2511), (3, 1.458469)])
def test_0_optimizer_has_pytorchs_momentum_and_weight_decay(toy, steps, expected):
    """Gradient w - 2, weight decay 0.1, momentum 0.9, lr 0.1, from 1."""
    result = toy(
        dataset="module:tests.toy.middle",
        model="module:tests.toy.at_ones",
        clients=1,
        local_epochs=steps,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.1,
    )
    near(weights(result)[W], [expected, expected])


def test_the_momentum_buffer_is_new_in_each_round(toy):
    options = {"dataset": "module:tests.toy.middle", "model": "module:tests.toy.at_ones", "clients": 1}
    result = toy(**options, local_epochs=1, rounds=2, lr=0.1, momentum=0.9)
    near(weights(result)[W], [1.19, 1.19])  # 1.28 with a buffer that survived


def test_fedavg(toy):
    near(weights(toy())[W], [0.375, 2.25], 0)


def test_fedprox(toy):
    near(weights(toy(("fedprox", {"mu": 1.0})))[W], [0.25, 1.5], 0)


DIGITS = {"rounds": 2, "local_epochs": 2, "participation": 0.5}


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    return model_bytes(run(tmp_path_factory.mktemp("fedavg"), **DIGITS))


@pytest.mark.parametrize("method", [("fedprox", {"mu": 1.0}), "scaffold"], ids=str)
def test_other_options_are_not(go, fedavg, method):
    assert model_bytes(go(method, **DIGITS)) != fedavg


def test_round_1_of_moon_is_fedavg(go):
    neutral = {"mu": 0.0}
    assert model_bytes(go("moon")) == model_bytes(go(("moon", neutral)))
    assert model_bytes(go("moon", rounds=2)) != model_bytes(go(("moon", neutral), rounds=2))


def test_moon_with_a_projection_starts_like_any_run_with_one(go):
    assert model_bytes(go(("moon", {"mu": 0.0}))) == model_bytes(go(projection=True))
