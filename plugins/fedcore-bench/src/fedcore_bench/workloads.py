"""What is timed: data made from a seed, models and settings of the workloads W1, W2, W3, tiny and pfl-cifar10.

The images are random with a pattern per class, so that training is training; nothing is read from disk. ``tiny`` has
scikit-learn's digits, which come with the package.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcore import SplitModel, numpy_generator
from fedcore.data import Dataset, IndexLists, IntArray, ResidentSamples

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """One thing to time.

    :param config: the run's options, by field of RunConfig.
    :param block: rounds that are timed together: a whole number of evaluations among them.
    """

    name: str
    config: Mapping[str, Any]
    block: int = 5


class Windows:
    """A partitioner: deals the samples in random order, the same number to each client, again from the start if needed.

    :param samples: the number per client.
    """

    shares_samples = True

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __call__(self, labels: IntArray, num_clients: int, *, seed: int, **_: Any) -> IndexLists:
        """Return each client's positions."""
        order = numpy_generator(seed, "partition").permutation(len(labels)).astype(np.int32)
        total = num_clients * self.samples
        dealt = torch.from_numpy(order).repeat(-(-total // len(order)))[:total]
        return IndexLists(dealt.contiguous(), torch.arange(0, total + 1, self.samples))


windows_of_16 = Windows(16)


def _images(n: int, shape: tuple[int, int, int], seed: int) -> ResidentSamples:
    stream = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (n,), generator=stream)
    images = torch.randn(n, *shape, generator=stream).add_(patterns[labels], alpha=0.5)
    return ResidentSamples(images, labels, [0.0] * shape[0], [1.0] * shape[0])


def _dataset(name: str, shape: tuple[int, int, int], train: int, data_dir: Path | None = None) -> Dataset:
    return Dataset(name, _images(train, shape, 1), _images(10_000, shape, 2), CLASSES, shape)


# Data sets by their numbers of training images; each has 10,000 test images.
mnist_shape = partial(_dataset, "1x28x28", (1, 28, 28), 60_000)
small_mnist_shape = partial(_dataset, "1x28x28", (1, 28, 28), 10_000)
cifar_shape = partial(_dataset, "3x32x32", (3, 32, 32), 50_000)
small_cifar_shape = partial(_dataset, "3x32x32", (3, 32, 32), 20_000)


def pfl_cnn(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return the network of pfl-research's CIFAR-10 benchmark: two 3x3 convolutions, dropout, one hidden layer of 128.

    :source: apple/pfl-research, benchmarks, CIFAR-10 IID without differential privacy; Glorot's initialisation.
    """
    channels, height, width = input_shape
    flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    base = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            pool=nn.MaxPool2d(2),  # before the ReLU: the same bits, less work
            relu2=nn.ReLU(),
            dropout1=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            fc1=nn.Linear(flat, 128),
            relu3=nn.ReLU(),
            dropout2=nn.Dropout(0.5),
        )
    )
    model = SplitModel(base, 128, num_classes)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model


_HERE = f"module:{__name__}."
_SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "partition": "iid", "eval_every": 5}

W1 = Workload(
    "W1",
    {**_SGD, "dataset": f"{_HERE}mnist_shape", "model": "fdcl-cnn", "clients": 100, "participation": 0.1,
     "local_epochs": 2, "batch_size": 32},
)  # fmt: skip
W2 = Workload(
    "W2",
    {**_SGD, "dataset": f"{_HERE}small_cifar_shape", "model": "simple-cnn", "projection": True, "clients": 10,
     "local_epochs": 1, "batch_size": 64},
)  # fmt: skip
W3 = Workload("W3", {**W2.config, "local_epochs": 5, "eval_every": 1000}, block=1)
"""Each method's round next to FedAvg's."""
PFL = Workload(
    "pfl-cifar10",
    {**_SGD, "dataset": f"{_HERE}cifar_shape", "model": f"{_HERE}pfl_cnn", "clients": 1000, "participation": 0.05,
     "local_epochs": 1, "batch_size": 10, "lr": 0.1, "momentum": 0.0, "eval_every": 10},
    block=10,
)  # fmt: skip
TINY = Workload(
    "tiny",
    {**_SGD, "dataset": "digits", "model": "mlp", "partition": f"{_HERE}windows_of_16", "clients": 1000,
     "participation": 0.1, "local_epochs": 1, "batch_size": 16, "eval_every": 10},
    block=10,
)  # fmt: skip
"""Clients of one step of 16 samples: what a client costs next to its steps."""
AGAINST_REFERENCE = {workload.name: workload for workload in (W1, W2, TINY, PFL)}
METHODS = ("fedprox", "moon", "fdcl", "fedproc", "fedeccr", "fedcd", "fedcme", "scaffold")
