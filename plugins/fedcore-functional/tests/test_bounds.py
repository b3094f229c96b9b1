"""Bounds of statistics: honest ones of any samples pass, those of no samples are refused."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedcore_functional import (
    FeatureOptions,
    FeatureRange,
    UnitLength,
    check_covariance,
    check_means,
    check_moves,
    feature_range,
)
from tests.sentences import raises

AFTER_RELU = FeatureRange(nonnegative=True)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Linear(2, 2), nn.ReLU()], AFTER_RELU),
        ([nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))], AFTER_RELU),
        ([nn.ReLU(), nn.Linear(2, 2), UnitLength()], FeatureRange(1.0)),
        ([nn.ReLU(), nn.Linear(2, 2)], FeatureRange()),
        ([], FeatureRange()),
    ],
)
def test_the_last_layer_says_what_features_can_be(layers, expected):
    assert feature_range(nn.Sequential(*layers)) == expected


def test_the_option_narrows_a_range():
    assert FeatureOptions().narrowed(FeatureRange(1.0, nonnegative=True)) == FeatureRange(1.0, nonnegative=True)
    assert FeatureOptions(feature_norm=5.0).narrowed() == FeatureRange(5.0)
    assert FeatureOptions(feature_norm=5.0).narrowed(FeatureRange(1.0)) == FeatureRange(1.0)


def statistics(features: np.ndarray):
    """Return n, mean and covariance by NumPy, in float64."""
    n = len(features)
    covariance = np.cov(features, rowvar=False).reshape(features.shape[1], -1) if n > 1 else np.zeros((3, 3))
    return n, torch.tensor(features.mean(0)), torch.tensor(covariance)


def sets_of_features():
    """Yield features (n, 3) and their range: ordinary ones, and the extremes that meet the bounds."""
    drawn = np.random.default_rng(0)
    for n in (1, 2, 3, 50):
        normal = drawn.normal(3, 2, (n, 3)) * [1, 1e-3, 1e3]
        yield normal, FeatureRange(float(np.linalg.norm(normal, axis=1).max()))
        yield np.maximum(normal, 0), AFTER_RELU
        unit = normal / np.linalg.norm(normal, axis=1, keepdims=True)
        yield unit, FeatureRange(1.0)
        yield np.concatenate([unit, -unit]), FeatureRange(1.0)
        alone = np.zeros((n, 3))
        alone[0] = [1e4, 0, 1e-4]  # all of the sum in one sample: variance = n mean^2
        yield alone, AFTER_RELU
        yield np.full((n, 3), 7.0), FeatureRange(7 * math.sqrt(3), nonnegative=True)
    yield np.zeros((4, 3)), FeatureRange(1.0, nonnegative=True)


@pytest.mark.parametrize(("features", "within"), list(sets_of_features()))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_honest_statistics_pass(features, within, dtype):
    n, mean, covariance = statistics(features)
    check_means("means", mean.to(dtype).unsqueeze(0), within)
    check_covariance(n, mean.to(dtype), covariance.to(dtype), within)


def test_means_of_no_features():
    means = torch.tensor([[3.0, 4.0], [0.0, -1.0]])
    check_means("p", means, FeatureRange(5.0))
    check_means("p", means[:0], FeatureRange(1.0, nonnegative=True))
    with raises(ValueError, "'p'", "5", "4.9"):
        check_means("p", means, FeatureRange(4.9))
    with raises(ValueError, "'p'", "-1"):
        check_means("p", means, AFTER_RELU)


@pytest.mark.parametrize(
    ("covariance", "within", "named"),
    [
        # R^2 - |mean|^2 = 4 * 1.01^2 - 2, times n / (n - 1) = 3 / 2: at most 3.12
        ([[2.0, 0.0], [0.0, 1.3]], FeatureRange(2.0), ("3.3", "3.12")),
        # n mean^2 = 3
        ([[0.0, 0.0], [0.0, 3.1]], AFTER_RELU, ("2",)),
        ([[1.0, 1.1], [1.1, 1.0]], FeatureRange(), ()),
        ([[-1.0, 0.0], [0.0, 1.0]], FeatureRange(), ()),
    ],
)
def test_covariances_of_no_features(covariance, within, named):
    check_covariance(3, torch.ones(2), torch.tensor([[2.0, 0.5], [0.5, 0.9]]), within)
    with raises(ValueError, *named):
        check_covariance(3, torch.ones(2), torch.tensor(covariance), within)


@pytest.mark.parametrize(
    ("moved", "optimizer", "refused"),
    [(0.0, "sgd", False), (0.59, "sgd", False), (0.63, "sgd", True), (9.0, "sgd", True), (9.0, "adam", False)],
)
def test_a_prototype_moves_no_further_than_its_steps(moved, optimizer, refused):
    """By hand: 3 steps of rate 0.1 with momentum 0.5, weight 2, tau 0.5 and length 4 move at most 0.6."""
    config = SimpleNamespace(optimizer=optimizer, momentum=0.5)
    server = SimpleNamespace(config=config, lr=0.1)
    start = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    sent = start + torch.tensor([[0.0, 0.0], [moved, 0.0]])
    with raises(ValueError, "'centres'", f"{moved:.3g}", "3 steps", 0.6) if refused else nullcontext():
        check_moves("centres", sent, start, server, steps=torch.full((len(sent),), 3), weight=2.0, temperature=0.5)
