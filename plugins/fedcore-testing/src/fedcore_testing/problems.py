"""Small data sets, models and partitioners that expose defects of plugins."""

from __future__ import annotations

import functools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcore import SplitModel, numpy_generator
from fedcore.data import Dataset, IntArray, Split, assemble, load_dataset

FEW = 120


@functools.cache
def few_digits(data_dir: Path | None = None) -> Dataset:
    """Return the first 120 training and 60 test images of digits."""
    digits = load_dataset("digits")
    train, test = (
        Split(samples.images[:size], samples.labels[:size])  # type: ignore[attr-defined]
        for samples, size in ((digits.train, FEW), (digits.test, FEW // 2))
    )
    return assemble("few-digits", train, test, stats=((0.0,), (1.0,)), num_classes=10)


def with_batch_norm(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a model with buffers and random draws: BatchNorm and dropout; features (B, 16)."""
    layers = OrderedDict(
        flatten=nn.Flatten(),
        linear=nn.Linear(int(np.prod(input_shape)), 16),
        norm=nn.BatchNorm1d(16),
        relu=nn.ReLU(),
        dropout=nn.Dropout(0.1),
    )
    return SplitModel(nn.Sequential(layers), 16, num_classes)


def with_fixed_layers(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a model whose first layer and BatchNorm are not trained, as in a frozen backbone; features (B, 16).

    One buffer is not saved with the model, as the positions of a BERT.
    """
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 16), nn.BatchNorm1d(16))
    backbone.requires_grad_(False)
    backbone.register_buffer("positions", torch.arange(16), persistent=False)
    layers = OrderedDict(backbone=backbone, relu=nn.ReLU(), linear=nn.Linear(16, 16))
    return SplitModel(nn.Sequential(layers), 16, num_classes)


def linear(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return softmax regression on the input; its NumPy twin is :func:`fedcore_testing.softmax_by_hand`."""
    return SplitModel(nn.Flatten(), int(np.prod(input_shape)), num_classes)


def hidden_tanh(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a model with one hidden layer; features (B, 6). Its NumPy twin is :func:`fedcore_testing.tanh_by_hand`."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 6), nn.Tanh()), 6, num_classes)


def halves(labels: IntArray, num_clients: int, *, seed: int, **_: Any) -> list[IntArray]:
    """Give the even classes to the even clients and the odd ones to the odd clients.

    No client has the last class, unless there are only two.
    """
    labels = np.unique(labels, return_inverse=True)[1]  # groups of a task's labels may have gaps
    order = numpy_generator(seed, "partition").permutation(len(labels))
    if labels.max() > 1:
        order = order[labels[order] < labels.max()]
    assigned = [np.array_split(order[labels[order] % 2 == side], (num_clients + 1 - side) // 2) for side in (0, 1)]
    return [assigned[client % 2][client // 2] for client in range(num_clients)]


def without_last(labels: IntArray, num_clients: int, **_: Any) -> list[IntArray]:
    """Give every client the same number of samples of every class but the last, which no client has."""
    order = np.argsort(labels, kind="stable")
    order = order[labels[order] < labels.max()]
    return [order[client::num_clients][: len(order) // num_clients] for client in range(num_clients)]


def one_sample(labels: IntArray, num_clients: int, **_: Any) -> list[IntArray]:
    """Give client 0 one sample and share the others."""
    return [np.arange(1), *np.array_split(np.arange(1, len(labels)), num_clients - 1)]


def two_one_rest(labels: IntArray, num_clients: int, **_: Any) -> list[IntArray]:
    """Give classes 0 and 1 to client 0, one sample of class 2 to client 1, the rest to client 2."""
    low, two = np.flatnonzero(labels < 2), np.flatnonzero(labels == 2)[:1]
    return [low, two, np.setdiff1d(np.arange(len(labels)), [*low, *two])]


def one_over(labels: IntArray, num_clients: int, **_: Any) -> list[IntArray]:
    """Give every client 17 samples: with batches of 16, one is left for the last."""
    return list(np.arange(17 * num_clients).reshape(num_clients, 17))


def uneven(labels: IntArray, num_clients: int, **_: Any) -> list[IntArray]:
    """Give each client more samples than the one before: 1, 2, 3, ... shares."""
    shares = np.cumsum(np.arange(1, num_clients + 1))
    return list(np.split(np.arange(len(labels)), shares[:-1] * len(labels) // shares[-1]))
