"""Small data sets with labels of each task. All but ``diabetes`` need no further library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedcore.data import Dataset, Split, TensorSamples, assemble, load_dataset, with_labels
from fedcore_tasks.multilabel import MultiLabel
from fedcore_tasks.regression import Regression
from fedcore_tasks.segmentation import Segmentation
from fedcore_tasks.survival import Survival
from fedcore_tasks.targets import Array

PROPERTIES = ((0, 2, 4, 6, 8), (2, 3, 5, 7), (0, 6, 8, 9), (5, 6, 7, 8, 9))
"""The digits that are even, prime, drawn with a loop, and 5 or more."""


def diabetes(data_dir: Path | None) -> Dataset:
    """Return scikit-learn's diabetes: 10 numbers of 442 patients, and the progress of their disease a year later."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x = x / x.std(axis=0)
    test = np.random.default_rng(0).permutation(len(x)) < len(x) // 5
    return with_labels(_table("diabetes", x[~test], x[test]), Regression, y[~test], y[test])


def _table(name: str, x_train: Array, x_test: Array) -> Dataset:
    """Return rows of a table, whose labels :func:`with_labels` replaces."""
    train, test = (
        TensorSamples(torch.from_numpy(x.astype(np.float32)), torch.zeros(len(x), dtype=torch.int64))
        for x in (x_train, x_test)
    )
    return Dataset(name, train, test, num_classes=1, input_shape=x_train.shape[1:], model="mlp")


def digit_properties(data_dir: Path | None) -> Dataset:
    """Return digits with four labels each: even, prime, with a loop, 5 or more."""
    digits = load_dataset("digits", data_dir)
    y = [
        np.stack([np.isin(part.labels.numpy(), digits_of) for digits_of in PROPERTIES], axis=1)
        for part in (digits.train, digits.test)
    ]
    return with_labels(replace(digits, name="digit-properties"), MultiLabel, *y)


def digit_shapes(data_dir: Path | None) -> Dataset:
    """Return digits with a square or a cross drawn over each; the mask says where which of the two is."""
    digits = load_dataset("digits", data_dir)
    rng, parts = np.random.default_rng(0), []
    for part in (digits.train, digits.test):
        inputs = part.gather(part.labels.argsort(stable=True))
        parts.append(_drawn_over(inputs.numpy().astype(np.float32), rng))
    (x_train, y_train), (x_test, y_test) = parts
    train, test = (Split(torch.from_numpy(x), torch.zeros(len(x), dtype=torch.int64)) for x in (x_train, x_test))
    return with_labels(assemble("digit-shapes", train, test, num_classes=1), Segmentation, y_train, y_test)


def _drawn_over(images: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return images (n, 1, 8, 8) with a square (1) or a cross (2) of 3 x 3 pixels each, and the masks (n, 8, 8)."""
    square = np.ones((3, 3), dtype=np.int64)
    cross = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]])
    images, masks = images.copy(), np.zeros((len(images), *images.shape[2:]), dtype=np.int64)
    bright = float(images.max())
    for image, mask in zip(images, masks, strict=True):
        kind, (top, left) = int(rng.integers(2)), rng.integers(0, 6, size=2)
        drawn = (square, cross)[kind].astype(bool)
        mask[top : top + 3, left : left + 3][drawn] = kind + 1
        image[0, top : top + 3, left : left + 3][drawn] = bright
    return images, masks


def simulated_survival(data_dir: Path | None) -> Dataset:
    """Return 1,000 made samples: 8 normal numbers, exponential times by three of them, about a third censored."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 8))
    time = rng.exponential(np.exp(-(x[:, 0] - 0.7 * x[:, 1] + 0.5 * x[:, 2])))
    limit = rng.exponential(2.0, size=len(x))
    y = np.column_stack([np.minimum(time, limit), time <= limit])
    return with_labels(_table("simulated-survival", x[:800], x[800:]), Survival, y[:800], y[800:])
