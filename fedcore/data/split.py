"""Normalise decoded images and assemble them into a data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.data.samples import Dataset, ResidentSamples


class Split(NamedTuple):
    """Images (n, C, H, W), uint8 or float32 and not normalised, and labels (n,) int64."""

    images: Tensor
    labels: Tensor


def assemble(
    name: str,
    train: Split,
    test: Split,
    *,
    stats: tuple[Sequence[float], Sequence[float]] | None = None,
    num_classes: int | None = None,
    class_names: tuple[str, ...] | None = None,
    augmentation: str | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Return a data set of images, normalised by ``stats`` or else by the training images' statistics."""
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{name}: training images are {tuple(train.images.shape[1:])} (C, H, W), "
            f"test images {tuple(test.images.shape[1:])}: resize them to one size"
        )
    mean, std = stats or channel_stats(train.images)
    samples = [ResidentSamples.from_pixels(*split, mean, std) for split in (train, test)]
    return Dataset(
        name=name,
        train=samples[0],
        test=samples[1],
        num_classes=num_classes or (len(class_names) if class_names else int(train.labels.max()) + 1),
        input_shape=tuple(train.images.shape[1:]),
        class_names=class_names,
        augmentation=augmentation,
        notes=notes,
    )


def unused(where: str, what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return a note that names what was found and not used; nothing where there are no names."""
    found = sorted(map(repr, names))
    return (f"{where}: {what} not used: {first_ten(found)}",) if found else ()


def first_ten(names: Sequence[object]) -> str:
    """Return names for a message, of many the first ten and how many there are more."""
    return ", ".join(map(str, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def channel_stats(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of [0, 1] brightness for uint8 images.

    Computed in double precision by NumPy, which adds in a fixed order: the result does not depend on the threads.
    """
    means, stds = [], []
    for channel in images.unbind(dim=1):
        if channel.dtype == torch.uint8:
            weights = np.bincount(channel.numpy().ravel(), minlength=256) / channel.numel()
            values = np.arange(256) / 255
            mean = float(weights @ values)
            std = float(np.sqrt(weights @ (values - mean) ** 2))
        else:
            array = channel.numpy()
            mean, std = float(array.mean(dtype=np.float64)), float(array.std(dtype=np.float64))
        means.append(mean)
        stds.append(std or 1.0)  # a constant channel is not scaled
    return tuple(means), tuple(stds)


def span(labels: Tensor) -> str:
    """Return the range of labels, for messages."""
    return f"{int(labels.min())}..{int(labels.max())}"
