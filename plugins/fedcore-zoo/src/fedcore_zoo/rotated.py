"""Groups of clients that disagree: the images of another data set in several turns, with a domain per turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fedcore import ConfigError
from fedcore.data import Dataset, Domains, ResidentSamples, load_dataset

QUARTERS = {"2": (0, 2), "4": (0, 1, 2, 3)}
"""The number of turns -> each turn in quarters."""


def rotated(name: str) -> Callable[[Path | None], Dataset]:
    """Images of another data set, once per turn, with the turns as domains: rotated:mnist, rotated:cifar10?turns=2.

    By quarters, or by 0 and 180 degrees: IFCA's rotated MNIST and CIFAR (Ghosh et al., NeurIPS 2020, section 6).
    """
    base, _, turns = name.partition("?turns=")
    turns = turns or "4"
    if turns not in QUARTERS:
        raise ConfigError(f"rotated:{name}: turns is {turns!r}, expected 2 or 4")
    if base.startswith(("module:", "object:")):
        raise ConfigError(f"rotated:{name}: it turns data sets with a name; turn images of your own in their loader")
    quarters = QUARTERS[turns]

    def load(data_dir: Path | None) -> Dataset:
        dataset = load_dataset(base, data_dir)
        parts = [part for part in (dataset.train, dataset.test) if isinstance(part, ResidentSamples)]
        square = len(set(dataset.input_shape[1:])) == 1
        if len(parts) < 2 or not (square or turns == "2"):
            raise ConfigError(f"rotated:{name}: {base} has no images that are as high as wide")
        train, test = (_turned(part, quarters) for part in parts)
        numbers, names = torch.arange(len(quarters)), tuple(str(90 * turn) for turn in quarters)
        domains = Domains(names, *(numbers.repeat_interleave(len(part)) for part in parts))
        groups = None if dataset.groups is None else dataset.groups.repeat(len(quarters))  # a patient in all turns
        turned = replace(dataset, name=f"rotated:{name}", train=train, test=test)
        return replace(turned, sources=None, groups=groups, domains=domains)

    return load


def _turned(samples: ResidentSamples, quarters: tuple[int, ...]) -> ResidentSamples:
    images = torch.cat([samples.images.rot90(turn, (2, 3)) for turn in quarters])
    masks = samples.labels.ndim > 2
    labels = torch.cat([samples.labels.rot90(turn, (1, 2)) if masks else samples.labels for turn in quarters])
    return ResidentSamples(images, labels, samples.mean, samples.std, from_bytes=samples.from_bytes)
