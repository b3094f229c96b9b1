"""Images in memory, and a data set of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.data.dataset import Dataset
from fedcore.data.samples import JSON, by_any_thread, check_labels

MAX_FLOAT_BYTES = 2 * 1024**3
"""The largest float32 copy of the images, in bytes. Larger sets stay uint8.

The rule is fixed, so that a run does not depend on the free memory.
"""


class ResidentSamples:
    """Images in memory, gathered by index. The tensors are kept on their device and never written to.

    :param images: (n, C, H, W), float32 and already normalised, or uint8 (0..255), which are normalised when gathered
        as (x/255 - mean)/std. Both give the same bits.
    :param labels: (n,) int64.
    :param mean: one number per channel, in units of [0, 1] brightness; ``std`` is given in the same way.
    :param from_bytes: whether normalised images were uint8, so that a user's new images are, too.
    :raises DataError: shapes or dtypes other than these.
    """

    kind: ClassVar[str] = "tensor"
    fixed_shape: ClassVar[bool] = True

    def __init__(
        self, images: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float], *, from_bytes: bool = False
    ) -> None:
        if images.ndim != 4 or images.dtype not in (torch.float32, torch.uint8):
            raise DataError(f"images must be (n, C, H, W) float32 or uint8, not {tuple(images.shape)} {images.dtype}")
        check_labels(labels, len(images), of_any_task=True)
        if not len(mean) == len(std) == images.shape[1]:
            raise DataError(f"mean and std need one number for each of the {images.shape[1]} channels")
        self._channels_last = not images.is_contiguous()
        # In the order of the memory, and no view, which would keep it from being freed.
        self._images = images.permute(0, 2, 3, 1).data if self._channels_last else images
        self.labels = labels
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.from_bytes = from_bytes or images.dtype == torch.uint8

    @classmethod
    def from_pixels(
        cls, pixels: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> ResidentSamples:
        """Return samples of ``pixels`` (n, C, H, W), not normalised: uint8, or float32 in units of ``mean``.

        uint8 images are normalised now. If the float32 copy would exceed ``MAX_FLOAT_BYTES``, they are normalised when
        gathered.
        """
        from_bytes = pixels.dtype == torch.uint8
        if pixels.dtype == torch.float32 or 4 * pixels.numel() <= MAX_FLOAT_BYTES:
            pixels = normalise(pixels, mean, std)
        return cls(pixels, labels, mean, std, from_bytes=from_bytes)

    @property
    def images(self) -> Tensor:
        """(n, C, H, W), float32 or uint8, in any memory format."""
        return self._images.permute(0, 3, 1, 2) if self._channels_last else self._images

    def __len__(self) -> int:
        return len(self.labels)

    @by_any_thread
    def gather(self, indices: Tensor) -> Tensor:
        """Return the normalised images at ``indices`` (B,) int64 as (B, C, H, W) float32, in their memory format."""
        batch = self._images.index_select(0, indices.to(self._images.device))
        if self._channels_last:
            batch = batch.permute(0, 3, 1, 2)
        return batch if batch.dtype == torch.float32 else normalise(batch, self.mean, self.std)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> ResidentSamples:
        """Return the samples on a device in a memory format, without a copy where nothing changes."""
        if self.labels.device == device and self.images.is_contiguous(memory_format=memory_format):
            return self
        images = self.images.to(device).contiguous(memory_format=memory_format)
        return ResidentSamples(images, self.labels.to(device), self.mean, self.std, from_bytes=self.from_bytes)

    def tensors(self) -> dict[str, Tensor]:
        """Return images and labels by name."""
        return {"images": self._images, "labels": self.labels}

    def meta(self) -> dict[str, JSON]:
        """Return the normalisation and the memory format (JSON keeps every bit of a float)."""
        return {"mean": list(self.mean), "std": list(self.std), "channels_last": self._channels_last}


def normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return images (n, C, H, W), uint8 or float32, as (x/255 - mean)/std or (x - mean)/std in float32."""
    # Elementwise in float32: normalising the set at once or batch by batch gives the same bits.
    unit = pixels.to(torch.float32).div_(255) if pixels.dtype == torch.uint8 else pixels.clone()
    for channel, shift, scale in zip(unit.unbind(1), mean, std, strict=True):  # scalars: nothing is copied to a device
        channel.sub_(shift).div_(scale)
    return unit


class Split(NamedTuple):
    """The training or the test part of a data set of images."""

    images: Tensor
    """(n, C, H, W), uint8 or float32, not normalised."""
    labels: Tensor
    """(n,) int64."""


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
    """Return a data set of images.

    :param stats: mean and standard deviation of each channel; by default of the training images.
    :raises DataError: training and test images have different sizes.
    """
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{name}: training images are {tuple(train.images.shape[1:])} (C, H, W), "
            f"test images {tuple(test.images.shape[1:])}: resize them to one size"
        )
    mean, std = stats or channel_stats(train.images)
    return Dataset(
        name=name,
        train=ResidentSamples.from_pixels(*train, mean, std),
        test=ResidentSamples.from_pixels(*test, mean, std),
        num_classes=num_classes or (len(class_names) if class_names else int(train.labels.max()) + 1),
        input_shape=tuple(train.images.shape[1:]),
        class_names=class_names,
        augmentation=augmentation,
        notes=notes,
    )


def channel_stats(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of [0, 1] brightness for uint8 images.

    NumPy computes them in double precision and adds in a fixed order: the result does not depend on the threads.
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
