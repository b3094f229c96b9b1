"""A data set of labels, 600 of ten classes by default, and a partition of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedcore.data import Dataset, Partition, ResidentSamples, make_partition


def make_dataset(n: int = 600, classes: int = 10, seed: int = 0, name: str = "toy") -> Dataset:
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))
    samples = ResidentSamples(torch.zeros(n, 1, 2, 2), labels, (0.0,), (1.0,))
    return Dataset(name, samples, samples, classes, (1, 2, 2))


DATASET = make_dataset()


def partitioned(dataset: Dataset = DATASET, **changes: Any) -> Partition:
    """Partition among ten clients that hold out a quarter each; ``changes`` are arguments of make_partition."""
    arguments: dict[str, Any] = {
        "partitioner": "dirichlet",
        "clients": 10,
        "alpha": 0.5,
        "classes_per_client": 2,
        "client_test_fraction": 0.25,
        "seed": 3,
    }
    return make_partition(dataset, **(arguments | changes))
