"""A data set of labels, 600 of ten classes by default, and a partition of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedcore import RunConfig
from fedcore.data import Dataset, Partition, ResidentSamples, make_partition


def make_dataset(n: int = 600, classes: int = 10, seed: int = 0, name: str = "toy") -> Dataset:
    return with_labels(torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n)), classes, name)


def with_labels(labels: torch.Tensor, classes: int | None = None, name: str = "toy") -> Dataset:
    samples = ResidentSamples(torch.zeros(len(labels), 1, 2, 2), labels, (0.0,), (1.0,))
    return Dataset(name, samples, samples, classes or int(labels.max()) + 1, (1, 2, 2))


DATASET = make_dataset()


def partitioned(dataset: Dataset = DATASET, **changes: Any) -> Partition:
    """Partition among ten clients that hold out a quarter each; ``changes`` are options of a run."""
    return make_partition(dataset, RunConfig.create({"client_test_fraction": 0.25, "seed": 3, **changes}))
