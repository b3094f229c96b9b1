"""A table that scikit-learn bundles, and a fixed split for sets that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedcore.data import Dataset, TensorSamples

Array: TypeAlias = npt.NDArray[Any]


def breast_cancer(data_dir: Path | None = None) -> Dataset:
    """Return scikit-learn's bundled breast-cancer table: 30 numbers, 2 classes, 455 to train and 114 to test.

    Measurements of cell nuclei (Wisconsin diagnostic data), normalised by the training rows' mean and standard
    deviation. The split is stratified and fixed; it does not depend on the run's seed.
    """
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    train, test = fixed_split(bunch.target, 0.2)
    mean, std = bunch.data[train].mean(axis=0), bunch.data[train].std(axis=0)  # float64, in NumPy's fixed order
    rows = torch.from_numpy((bunch.data - mean) / std).to(torch.float32)
    labels = torch.from_numpy(bunch.target.astype(np.int64))

    def samples(part: Array) -> TensorSamples:
        return TensorSamples(rows[part], labels[part], mean=mean, std=std, columns=bunch.feature_names)

    return Dataset(
        name="breast-cancer",
        train=samples(train),
        test=samples(test),
        num_classes=2,
        input_shape=(30,),
        class_names=tuple(map(str, bunch.target_names)),
        model="mlp",
    )


def fixed_split(labels: Any, test_size: float) -> tuple[Array, Array]:
    """Return the positions of a stratified training and test part of ``labels`` (n,), always the same."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(np.arange(len(labels)), test_size=test_size, stratify=labels, random_state=0)
    return train, test
