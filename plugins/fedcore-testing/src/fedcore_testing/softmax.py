"""Small models and their training in NumPy's float64: a reference for whole runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fedcore import RunResult
from fedcore_testing.analytic import FloatArray
from fedcore_testing.federation import data_of

Arrays: TypeAlias = dict[str, FloatArray]
"""A model, or its gradient, by name."""


def client_arrays(result: RunResult | Path, *, held_out: bool = False) -> list[tuple[FloatArray, FloatArray]]:
    """Return the training samples of each client of a run: inputs (n, d) and one-hot labels (n, C).

    :param held_out: the held-out samples instead.
    """
    dataset, partition = data_of(result)
    one_hot = np.eye(dataset.num_classes)
    return [
        (dataset.train.gather(part).double().flatten(1).numpy(), one_hot[dataset.train.labels[part].numpy()])
        for part in (partition.test if held_out else partition.train)
    ]


def softmax_by_hand(w: Mapping[str, FloatArray], x: FloatArray, y: FloatArray) -> tuple[float, Arrays]:
    """Return the mean cross-entropy of the classifier on inputs x (n, d), and its gradient by name.

    On the samples of a run this is the model :func:`~fedcore_testing.linear`.

    :param w: a model with ``classifier.weight`` (C, d) and ``classifier.bias`` (C,).
    :param y: one-hot labels (n, C).
    """
    logits = x @ w["classifier.weight"].T + w["classifier.bias"]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    error = (np.exp(log_p) - y) / len(x)
    gradient = {"classifier.weight": error.T @ x, "classifier.bias": error.sum(axis=0)}
    return float(-(log_p * y).sum(axis=1).mean()), gradient


def tanh_by_hand(
    w: Mapping[str, FloatArray],
    x: FloatArray,
    y: FloatArray,
    pull: Callable[[FloatArray], FloatArray] = np.zeros_like,
) -> Arrays:
    """Return the gradient of the mean cross-entropy of the model :func:`~fedcore_testing.hidden_tanh`, by name.

    :param x: inputs (n, d); ``y`` one-hot labels (n, C).
    :param pull: the gradient of a further term in the features (n, 6), from these features.
    """
    features = np.tanh(x @ w["encoder.base.1.weight"].T + w["encoder.base.1.bias"])
    _, gradient = softmax_by_hand(w, features, y)
    logits = features @ w["classifier.weight"].T + w["classifier.bias"]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = (odds / odds.sum(axis=1, keepdims=True) - y) / len(x)
    below = (error @ w["classifier.weight"] + pull(features)) * (1 - features**2)
    return gradient | {"encoder.base.1.weight": below.T @ x, "encoder.base.1.bias": below.sum(axis=0)}


def sgd_by_hand(
    gradient: Callable[[Arrays, FloatArray, FloatArray], Arrays],
    w: Mapping[str, FloatArray],
    x: FloatArray,
    y: FloatArray,
    steps: int,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 1e-2,
) -> Arrays:
    """Return a model after some steps of PyTorch's SGD on all samples x, y; what has no gradient stays."""
    own, speed = dict(w), dict.fromkeys(w, np.zeros(()))
    for _ in range(steps):
        for name, slope in gradient(own, x, y).items():
            speed[name] = momentum * speed[name] + slope + weight_decay * own[name]
            own = {**own, name: own[name] - lr * speed[name]}
    return own


def mean_by_hand(models: Sequence[Mapping[str, FloatArray]], shares: Sequence[float]) -> Arrays:
    """Return the mean of models by name, each weighted by its share, such as its client's number of samples."""
    return {name: np.average([model[name] for model in models], axis=0, weights=shares) for name in models[0]}
