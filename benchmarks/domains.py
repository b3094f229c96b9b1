"""Digits in several domains, and a small network with BatchNorm: what methods against feature shift are measured on.

``digits`` are the bundled digits, plain, inverted, pale or noisy:

    PYTHONPATH=benchmarks fedcore sweep --grid plugin=fedavg,solo,fedbn,fpl,lg-fedavg \
        --dataset module:domains.digits --model module:domains.Net --partition natural --clients 8 \
        --client-test-fraction 0.2 --workers 0 --seeds 3 --out sweeps/domains

Each of the eight clients has an eighth of the training images, in one domain; a domain has two clients. Each test
image is in one domain, in turn. The classes are as frequent everywhere: the clients differ in their images alone. They
are the same for every seed.

``origins`` are digits of two origins, MNIST and the bundled ones of UCI, scaled up to 28x28; of each origin a third is
as it is, a third is turned by 30 degrees and a third is inverted. These six domains share no sample. For example:

    PYTHONPATH=benchmarks fedcore sweep --grid plugin=fedavg,fedbn --dataset module:domains.origins --data-dir data \
        --model module:domains.Net --partition domain --clients 12 --unseen-domain uci-inverted --seeds 3
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore.data import Dataset, Domains, TensorSamples, load_dataset

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
    turns = torch.arange(len(plain.test))
    return Dataset(
        name="digits in four domains",
        train=moved(plain.train, clients),
        test=moved(plain.test, turns),
        num_classes=plain.num_classes,
        input_shape=plain.input_shape,
        sources=clients,
        domains=Domains(("plain", "inverted", "pale", "noisy"), clients % len(DOMAINS), turns % len(DOMAINS)),
    )


MNIST_SAMPLES = {"train": 1500, "test": 1500}
"""The samples of MNIST that are used. The bundled digits have 1,437 and 360."""


def turned(images: Tensor) -> Tensor:
    """Return images (n, 1, H, W) turned by 30 degrees, with the ground at the corners."""
    angle = torch.tensor(torch.pi / 6)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0]).view(1, 2, 3)
    grid = F.affine_grid(rotation.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


def origins(data_dir: Path | None = None) -> Dataset:
    """Return digits of MNIST and of UCI in six domains, 1x28x28 with values from 0 to 1."""
    sets = {"mnist": load_dataset("mnist", data_dir), "uci": load_dataset("digits")}
    changes = {"": lambda images: images, "-turned": turned, "-inverted": lambda images: 1 - images}
    names = [origin + change for origin in sets for change in changes]
    parts = []
    for part in ("train", "test"):
        images, labels, domains = [], [], []
        for origin, dataset in sets.items():
            samples = getattr(dataset, part)
            count = min(len(samples), MNIST_SAMPLES[part])
            found = samples.gather(torch.arange(count))
            low, high = found.amin(), found.amax()
            found = F.interpolate((found - low) / (high - low), (28, 28), mode="bilinear")
            for turn, (name, change) in enumerate(changes.items()):
                images.append(change(found[turn::3]))
                labels.append(samples.labels[turn:count:3])
                domains.append(torch.full((len(labels[-1]),), names.index(origin + name)))
        parts.append((TensorSamples(torch.cat(images), torch.cat(labels)), torch.cat(domains)))
    (train, of_train), (test, of_test) = parts
    return Dataset(
        name="digits of two origins",
        train=train,
        test=test,
        num_classes=10,
        input_shape=(1, 28, 28),
        domains=Domains(tuple(names), of_train, of_test),
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

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(
                nn.Flatten(),
                nn.Linear(32 * (input_shape[1] // 4) * (input_shape[2] // 4), 64),
                nn.BatchNorm1d(64),
                nn.ReLU(),
            ),
        )
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.body(images))
