"""One client's part of a data set: the batches of an epoch, and their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcore.base.registry import resolve
from fedcore.data.dataset import Dataset
from fedcore.data.samples import Samples


class Picked(NamedTuple):
    """The samples of one batch, on the device."""

    positions: Tensor
    """Positions in the client's samples, (B,) int64."""
    rows: Tensor
    """Positions in the data set, (B,) int64."""
    labels: Tensor
    """Classes, (B,) int64."""
    drawn: Tensor | None
    """Random numbers of the augmentation, (B, numbers); None without augmentation."""

    def clone(self) -> Picked:
        """Return a copy in newly allocated memory."""
        return Picked(*(None if part is None else part.clone() for part in self))  # type: ignore[arg-type]

    def copy_(self, other: Picked) -> None:
        """Copy the values of a batch of the same size into this one."""
        for own, value in zip(self, other, strict=True):
            if own is not None and value is not None:
                own.copy_(value)


class Augmentation(Protocol):
    """Random changes of training samples: an entry point of the group ``fedcore.augmentations``, or ``module:...``."""

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return the random numbers for ``n`` samples from ``generator`` alone, (n, numbers) float32 on the CPU."""

    def apply(self, x: Tensor, drawn: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """Return a batch, such as images (B, C, H, W), changed by ``drawn`` (B, numbers).

        The batch is normalised by ``mean`` and ``std``; these are empty if the samples have none.

        No host synchronisation: a runner may replay the operations on a device.
        """


class ClientData:
    """Samples of one client by position 0..n-1, in the order of the partition.

    :param indices: positions in ``samples`` that belong to the client, (n,) int64.
    :param augmentation: changes training batches; None without augmentation.
    """

    def __init__(
        self, samples: Samples, indices: Tensor, device: torch.device, augmentation: Augmentation | None = None
    ) -> None:
        self._samples = samples
        self._indices = indices.to(device)
        self._device = device
        self._augmentation = augmentation
        self._inputs: Tensor | None = None  # by position, instead of the data set's; see changed
        self._labels: Tensor | None = None

    @cached_property
    def labels(self) -> Tensor:
        """Classes by position, (n,) int64, on the device."""
        return self._labels_of(self._indices) if self._labels is None else self._labels

    def _labels_of(self, rows: Tensor) -> Tensor:
        labels = self._samples.labels
        return labels.index_select(0, rows.to(labels.device)).to(self._device)

    @classmethod
    def training(cls, dataset: Dataset, indices: Tensor, device: torch.device, *, augmented: bool) -> ClientData:
        """Return a client's training part."""
        augmentation = resolve("augmentation", dataset.augmentation) if augmented and dataset.augmentation else None
        return cls(dataset.train, indices, device, augmentation)

    def __len__(self) -> int:
        return self._indices.numel()  # a tensor's len() takes ten times as long

    def changed(self, *, inputs: Tensor | None = None, labels: Tensor | None = None) -> ClientData:
        """Return a copy in which the samples have other inputs (n, ...) or labels (n,) int64, before augmentation.

        :raises ValueError: the number of inputs or labels is not n.
        """
        if any(values is not None and len(values) != len(self) for values in (inputs, labels)):
            raise ValueError(f"the client has {len(self)} samples; give as many inputs and labels")
        changed = copy.copy(self)
        if inputs is not None:
            changed._inputs = inputs.to(self._device)
        if labels is not None:
            changed._labels = labels.to(self._device)
            vars(changed).pop("labels", None)  # cached
        return changed

    @property
    def varies(self) -> bool:
        """Whether the input at a position changes from epoch to epoch."""
        return self._augmentation is not None

    def batches(self, order: Tensor, size: int, stream: Callable[[], torch.Generator]) -> Iterator[Picked]:
        """Yield one epoch's batches: the samples at ``order`` (n,), ``size`` at a time, the last perhaps fewer.

        :param stream: makes the generator from which the augmentation draws; not called without augmentation.
        """
        positions = order.to(self._device)
        rows = self._indices.index_select(0, positions)
        labels = self._labels_of(rows) if self._labels is None else self._labels.index_select(0, positions)
        drawn: Iterator[Tensor | None] = repeat(None)
        if self._augmentation is None and len(order) <= size:
            yield Picked(positions, rows, labels, None)  # splitting them takes as long as gathering them
            return
        if self._augmentation is not None:
            drawn = iter(self._augmentation.draw(len(order), stream()).to(self._device).split(size))
        for parts in zip(positions.split(size), rows.split(size), labels.split(size), strict=True):
            yield Picked(*parts, next(drawn))

    def inputs(self, positions: Tensor) -> Any:
        """Return the inputs at these positions (on the device), not augmented."""
        return self._gathered(positions, self._indices[positions])

    def _gathered(self, positions: Tensor, rows: Tensor) -> Any:
        if self._inputs is not None:
            return self._inputs.index_select(0, positions)
        return self._samples.gather(rows).to(self._device)

    def inputs_of(self, picked: Picked) -> Any:
        """Return the inputs of a batch, augmented by its ``drawn`` numbers."""
        x = self._gathered(picked.positions, picked.rows)
        if picked.drawn is None:
            return x
        assert self._augmentation is not None
        mean, std = (getattr(self._samples, name, ()) for name in ("mean", "std"))
        return self._augmentation.apply(x, picked.drawn, mean, std)
