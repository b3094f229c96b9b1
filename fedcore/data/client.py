"""One client's samples: gathered by position, moved to the device, augmented where the run asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedcore.data.augment import augment
from fedcore.data.samples import Dataset, ResidentSamples, Samples


class ClientData:
    """Samples of one client by position 0..n-1, in data-set order.

    :param indices: positions in ``samples`` that belong to the client, int64 (n,).
    :param augmentation: name of the augmentation that training batches get; None for none.
    """

    def __init__(
        self, samples: Samples, indices: Tensor, device: torch.device, augmentation: str | None = None
    ) -> None:
        self._samples = samples
        self._indices = indices
        self._device = device
        self._augmentation = augmentation
        self.labels = samples.labels[indices].to(device)

    @classmethod
    def training(cls, dataset: Dataset, indices: Tensor, device: torch.device, *, augmented: bool) -> ClientData:
        """Return a client's training part."""
        return cls(dataset.train, indices, device, dataset.augmentation if augmented else None)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def varies(self) -> bool:
        """Whether the same position gives another input from epoch to epoch."""
        return self._augmentation is not None

    def inputs(self, positions: Tensor) -> Any:
        """Return the inputs at these positions as they are, on the device."""
        return self._samples.gather(self._indices[positions]).to(self._device)

    def augmented_inputs(self, positions: Tensor, stream: torch.Generator) -> Any:
        """Return the inputs at these positions, augmented with draws from ``stream``, on the device."""
        samples = self._samples
        assert self._augmentation is not None
        assert isinstance(samples, ResidentSamples)
        x = samples.gather(self._indices[positions])
        return augment(self._augmentation, x, stream, samples.mean, samples.std).to(self._device)
