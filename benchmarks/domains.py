"""Digits in four domains, and a small network with BatchNorm: what methods against feature shift are measured on.

    PYTHONPATH=benchmarks fedcore sweep --grid plugin=fedavg,solo,fedbn,fpl,lg-fedavg \
        --dataset module:domains.digits --model module:domains.Net --partition natural --clients 8 \
        --client-test-fraction 0.2 --workers 0 --seeds 3 --out sweeps/domains

Each of the eight clients has an eighth of the training images, in one domain; a domain has two clients. Each test
image is in one domain, in turn. The classes are as frequent everywhere: the clients differ in their images alone. They
are the same for every seed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcore.data import Dataset, TensorSamples, load_dataset

CLIENTS = 8


def noisy(images: Tensor) -> Tensor:
    """Return images under noise that is the same in every process."""
    return images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


DOMAINS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda images: images,
    lambda images: -images,
    lambda images: 0.2 * images + 2,
    noisy,
)
"""The plain images, inverted ones, pale ones on a bright ground, and noisy ones."""


def digits(data_dir: Path | None = None) -> Dataset:
    """Return the bundled digits, each sample in a domain, with the client that holds it as its source."""
    plain = load_dataset("digits")
    clients = torch.randperm(len(plain.train), generator=torch.Generator().manual_seed(0)) % CLIENTS
    return Dataset(
        name="digits in four domains",
        train=moved(plain.train, clients),
        test=moved(plain.test, torch.arange(len(plain.test))),
        num_classes=plain.num_classes,
        input_shape=plain.input_shape,
        sources=clients,
    )


def moved(samples: TensorSamples, turn: Tensor) -> TensorSamples:
    """Return samples of which each is moved to the domain of its number, counted around."""
    images = samples.gather(torch.arange(len(samples)))
    for number, domain in enumerate(DOMAINS):
        chosen = turn % len(DOMAINS) == number
        images[chosen] = domain(images[chosen])
    return TensorSamples(images, samples.labels)


class Net(nn.Module):
    """Two convolutions and a hidden layer, each with BatchNorm."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU()),
        )
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.body(images))
