"""Softmax regression in NumPy's float64: a reference for whole runs on the model :func:`~fedcore_testing.linear`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    :param w: a model with ``classifier.weight`` (C, d) and ``classifier.bias`` (C,).
    :param y: one-hot labels (n, C).
    """
    logits = x @ w["classifier.weight"].T + w["classifier.bias"]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    error = (np.exp(log_p) - y) / len(x)
    gradient = {"classifier.weight": error.T @ x, "classifier.bias": error.sum(axis=0)}
    return float(-(log_p * y).sum(axis=1).mean()), gradient


def mean_by_hand(models: Sequence[Mapping[str, FloatArray]], shares: Sequence[float]) -> Arrays:
    """Return the mean of models by name, each weighted by its share, such as its client's number of samples."""
    return {name: np.average([model[name] for model in models], axis=0, weights=shares) for name in models[0]}
