"""Analytically solvable data, models and partitions: the model is a point, a sample is a centre."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedcore import SplitModel
from fedcore.data import Dataset, ResidentSamples
from fedcore_testing.analytic import PointModel


def _samples(points, labels=None) -> ResidentSamples:
    images = torch.tensor(points, dtype=torch.float32).view(len(points), 1, 1, -1)
    labels = torch.tensor(labels if labels is not None else [i % 2 for i in range(len(points))])
    return ResidentSamples(images, labels, [0.0], [1.0])


def _dataset(points) -> Dataset:
    return Dataset("toy", _samples(points), _samples([[0.0, 0.0]] * 4), num_classes=2, input_shape=(1, 1, 2))


def two_centres(data_dir=None) -> Dataset:
    """f_1 = |w - (2, 0)|^2 / 2 with one sample, f_2 = |w - (0, 4)|^2 / 2 with three."""
    return _dataset([[2, 0], [0, 4], [0, 4], [0, 4]])


def heads(data_dir=None) -> Dataset:
    """Bases 1 (n = 1) and 3 (n = 3), heads 7 and -7."""
    return _dataset([[1, 7], [3, -7], [3, -7], [3, -7]])


def one_centre(data_dir=None) -> Dataset:
    """One sample at (2, 0)."""
    return _dataset([[2, 0]])


def middle(data_dir=None) -> Dataset:
    """One sample at (2, 2)."""
    return _dataset([[2, 2]])


def first_and_rest(labels, num_clients, **_) -> list:
    """Deal the first sample to client 0 and the rest to client 1; one client gets all."""
    return [np.arange(len(labels))] if num_clients == 1 else [np.array([0]), np.arange(1, len(labels))]


def single_and_rest(labels, num_clients, **_) -> list:
    """Deal one sample to client 0 and the rest evenly, in shuffled order."""
    order = np.random.default_rng(0).permutation(len(labels))
    return [order[:1], *np.array_split(order[1:], num_clients - 1)]


def one_over(labels, num_clients, **_) -> list:
    """Deal 65 samples to client 0, so that its last batch of 64 holds one, and 64 to each other one."""
    order = np.random.default_rng(0).permutation(len(labels))
    return [order[:65], *(order[65 + 64 * k : 129 + 64 * k] for k in range(num_clients - 1))]


def by_class(labels, num_clients, **_) -> list:
    """Deal classes 0 and 1 to client 0 and the rest to the others."""
    low = np.flatnonzero(labels < 2)
    return [low, *np.array_split(np.flatnonzero(labels >= 2), num_clients - 1)]


def at_origin(num_classes, input_shape):
    return PointModel([0.0, 0.0])


def at_ones(num_classes, input_shape):
    return PointModel([1.0, 1.0])


def dropout_mlp(num_classes, input_shape):
    """A small MLP whose training draws random numbers."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5)), 16, num_classes)


def batch_norm_mlp(num_classes, input_shape):
    """A small MLP with float and integer buffers."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()), 16, num_classes)
