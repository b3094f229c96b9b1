"""Samples: the interface of a data set, labels and batches gathered by position, and one client's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.base.registry import resolve

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

#: The largest float32 copy of the images, in bytes; larger sets stay uint8. A fixed rule, so that a run does not
#: depend on the free memory.
MAX_FLOAT_BYTES = 2 * 1024**3


class Samples(Protocol):
    """Labelled samples: images, rows of a table, texts, graphs.

    A batch is a tensor (B, ...), or any object with ``to(device)`` that models of its kind take. The core gathers it by
    position, moves it and passes it to the model, and does not look into it.

    Samples are named tensors and JSON, so that worker processes map one copy: ``from_tensors(tensors(), meta())`` must
    gather the same bits. The tensors are never written to.

    :cvar kind: kind of the batches: ``"tensor"``, or another word such as ``"graphs"`` that models name in ``takes``.
    :cvar fixed_shape: whether all batches of one size have the same shapes; CUDA graphs need
        this.
    """

    kind: ClassVar[str]
    fixed_shape: ClassVar[bool]

    @property
    def labels(self) -> Tensor:
        """Classes, (n,) int64."""

    def __len__(self) -> int: ...

    def gather(self, indices: Tensor) -> Any:
        """Return the model's input for the samples at ``indices`` (B,) int64, in this order."""

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Self:
        """Return the samples on a device; ``memory_format`` applies to images, other samples ignore it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors from which, with :meth:`meta`, another process rebuilds the samples."""

    def meta(self) -> dict[str, JSON]:
        """Return everything else as JSON values."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        """Return samples over the given tensors without a copy; they may be memory-mapped."""


class ResidentSamples:
    """Images in memory, gathered by index.

    ``images`` (n, C, H, W) is float32, already normalised, or uint8 (0..255), normalised when gathered as
    (x/255 - mean)/std; both give the same bits. ``labels`` (n,) int64. ``mean`` and ``std``, one number per
    channel, are in units of [0, 1] brightness. The tensors are kept on their device and never written to.

    :raises DataError: shapes or dtypes other than these.
    """

    kind: ClassVar[str] = "tensor"
    fixed_shape: ClassVar[bool] = True

    def __init__(self, images: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
        if images.ndim != 4 or images.dtype not in (torch.float32, torch.uint8):
            raise DataError(f"images must be (n, C, H, W) float32 or uint8, not {tuple(images.shape)} {images.dtype}")
        if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
            raise DataError(
                f"labels must be int64 of shape ({len(images)},), not {labels.dtype} of {tuple(labels.shape)}"
            )
        if not len(mean) == len(std) == images.shape[1]:
            raise DataError(f"mean and std need one number for each of the {images.shape[1]} channels")
        self.images, self.labels = images, labels
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))

    @classmethod
    def from_pixels(
        cls, pixels: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> ResidentSamples:
        """Return samples of ``pixels`` (n, C, H, W), not normalised: uint8, or float32 in units of ``mean``.

        uint8 images are normalised now, or when gathered if the float32 copy would exceed ``MAX_FLOAT_BYTES``.
        """
        if pixels.dtype == torch.float32 or 4 * pixels.numel() <= MAX_FLOAT_BYTES:
            pixels = _normalise(pixels, mean, std)
        return cls(pixels, labels, mean, std)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Tensor:
        """Return the normalised images at ``indices`` (B,) int64 as (B, C, H, W) float32, in their memory format."""
        images = self.images
        indices = indices.to(images.device)
        if images.is_contiguous():
            batch = images.index_select(0, indices)
        else:  # channels_last, which index_select would undo
            batch = images.permute(0, 2, 3, 1).index_select(0, indices).permute(0, 3, 1, 2)
        return batch if batch.dtype == torch.float32 else _normalise(batch, self.mean, self.std)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> ResidentSamples:
        """Return the samples on a device in a memory format, without a copy where nothing changes."""
        images = self.images.to(device).contiguous(memory_format=memory_format)
        return ResidentSamples(images, self.labels.to(device), self.mean, self.std)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors from which, with :meth:`meta`, another process rebuilds the samples."""
        images = self.images if self.images.is_contiguous() else self.images.permute(0, 2, 3, 1)
        return {"images": images, "labels": self.labels}

    def meta(self) -> dict[str, JSON]:
        """Return everything else as JSON values (JSON keeps every bit of a float)."""
        return {"mean": list(self.mean), "std": list(self.std), "channels_last": not self.images.is_contiguous()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ResidentSamples:
        """Return samples over the given tensors without a copy, e.g. over a memory-mapped file."""
        images = tensors["images"].permute(0, 3, 1, 2) if meta["channels_last"] else tensors["images"]
        return cls(images, tensors["labels"], meta["mean"], meta["std"])


@dataclass(frozen=True)
class PublicSamples:
    """Samples that belong to no client.

    :param samples: what they are rows of; ``rows`` (n,) int64.
    """

    samples: Samples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """Classes, (n,) int64; those of another data set may mean something else than the run's."""
        return self.samples.labels[self.rows.to(self.samples.labels.device)]

    def inputs(self, positions: Tensor) -> Any:
        """Return the model's input for the samples at positions 0..n-1 (B,) int64, in this order."""
        return self.samples.gather(self.rows[positions.to(self.rows.device)])


@dataclass(frozen=True)
class Dataset:
    """A training set, split among the clients, and a test set, which only the server uses.

    ``input_shape`` is the argument of model factories: the shape of one sample, (C, H, W) for images; other kinds of
    samples define their own. ``augmentation`` is the name of an :class:`Augmentation`, None without one.
    ``model`` is the model of ``--model auto``, None for the rule for images. ``public`` are the run's public samples.
    ``sources`` (n,) int64 numbers where each training sample comes from, a writer or a hospital, for the partition
    ``natural``. ``notes`` are lines for the user, such as what a file holds that is not used.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...] | None = None
    augmentation: str | None = None
    model: str | None = None
    public: PublicSamples | None = None
    sources: Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of batches, as models name it in ``takes``."""
        return self.train.kind


class Picked(NamedTuple):
    """The samples of one batch, on the device.

    :param positions: positions in the client's samples, (B,) int64; ``rows`` in the data set; ``labels`` (B,) int64.
    :param drawn: the random numbers of the augmentation, (B, numbers); None without augmentation.
    """

    positions: Tensor
    rows: Tensor
    labels: Tensor
    drawn: Tensor | None

    def clone(self) -> Picked:
        """Return a copy in newly allocated memory."""
        return Picked(*(None if part is None else part.clone() for part in self))  # type: ignore[arg-type]

    def copy_(self, other: Picked) -> None:
        """Copy the values of a batch of the same size into this one."""
        for own, value in zip(self, other, strict=True):
            if own is not None and value is not None:
                own.copy_(value)


class Augmentation(Protocol):
    """Random changes of training images, installed under the entry point group ``fedcore.augmentations``."""

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return the random numbers for ``n`` images from ``generator`` alone, (n, numbers) float32 on the CPU."""

    def apply(self, x: Tensor, drawn: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """Return images (B, C, H, W), normalised by ``mean`` and ``std``, changed by ``drawn`` (B, numbers).

        Capture-safe: no host synchronisation.
        """


class ClientData:
    """Samples of one client by position 0..n-1, in data-set order.

    :param indices: positions in ``samples`` that belong to the client, int64 (n,).
    :param augmentation: what training batches get; None without augmentation.
    """

    def __init__(
        self, samples: Samples, indices: Tensor, device: torch.device, augmentation: Augmentation | None = None
    ) -> None:
        self._samples = samples
        self._indices, self._count = indices.to(device), len(indices)
        self._device = device
        self._augmentation = augmentation

    @cached_property
    def labels(self) -> Tensor:
        """Classes by position, (n,) int64, on the device."""
        return self._labels_of(self._indices)

    def _labels_of(self, rows: Tensor) -> Tensor:
        labels = self._samples.labels
        return labels.index_select(0, rows.to(labels.device)).to(self._device)

    @classmethod
    def training(cls, dataset: Dataset, indices: Tensor, device: torch.device, *, augmented: bool) -> ClientData:
        """Return a client's training part."""
        augmentation = resolve("augmentation", dataset.augmentation) if augmented and dataset.augmentation else None
        return cls(dataset.train, indices, device, augmentation)

    def __len__(self) -> int:
        return self._count

    @property
    def varies(self) -> bool:
        """Whether the input at a position changes from epoch to epoch."""
        return self._augmentation is not None

    def batches(self, order: Tensor, size: int, stream: Callable[[], torch.Generator]) -> Iterator[Picked]:
        """Yield one epoch's batches: the samples at ``order`` (n,), ``size`` at a time, the last perhaps fewer.

        :param stream: makes the generator of the augmentations' random numbers, where there are any.
        """
        positions = order.to(self._device)
        rows = self._indices.index_select(0, positions)
        labels = self._labels_of(rows)
        drawn: Iterator[Tensor | None] = repeat(None)
        if self._augmentation is not None:
            drawn = iter(self._augmentation.draw(len(order), stream()).to(self._device).split(size))
        if len(order) <= size:
            yield Picked(positions, rows, labels, next(drawn))
            return
        for parts in zip(positions.split(size), rows.split(size), labels.split(size), strict=True):
            yield Picked(*parts, next(drawn))

    def inputs(self, positions: Tensor) -> Any:
        """Return the inputs at these positions (on the device), not augmented."""
        return self._samples.gather(self._indices[positions]).to(self._device)

    def inputs_of(self, picked: Picked) -> Any:
        """Return the inputs of a batch, augmented by its ``drawn`` numbers."""
        x = self._samples.gather(picked.rows).to(self._device)
        if picked.drawn is None:
            return x
        assert self._augmentation is not None
        assert isinstance(self._samples, ResidentSamples)
        return self._augmentation.apply(x, picked.drawn, self._samples.mean, self._samples.std)


def _normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    # Elementwise in float32: normalising the set at once or batch by batch gives the same bits.
    unit = pixels.to(torch.float32).div_(255) if pixels.dtype == torch.uint8 else pixels.clone()
    for channel, shift, scale in zip(unit.unbind(1), mean, std, strict=True):  # scalars: a captured step copies nothing
        channel.sub_(shift).div_(scale)
    return unit
