"""Where a run's tensors live and how they are laid out: a fixed rule per device and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.data import Dataset

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Placement:
    """A device and the memory format of images and convolutions on it.

    The numbers that a method sees are the same in every format; only the order of additions inside a
    convolution, and with it the last bits, differ.
    """

    device: torch.device
    memory_format: torch.memory_format

    @classmethod
    def of(cls, config: RunConfig, model: nn.Module) -> Placement:
        """Return what the configuration asks for.

        ``auto`` is channels_last for convolutional models on the CPU, and in bf16 on CUDA: measured 1.15 to 1.4
        times as fast per step (docs/performance.md). CUDA's float32 convolutions keep the contiguous format.
        """
        device = resolve_device(config.device)
        wanted = config.memory_format
        if wanted == "auto":
            suited = device.type == "cpu" or config.precision == "bf16"
            wanted = "channels_last" if suited and convolves(model) else "contiguous"
        return cls(device, torch.channels_last if wanted == "channels_last" else torch.contiguous_format)

    @classmethod
    def plain(cls) -> Placement:
        """Return how models and updates are kept: on the CPU, contiguous."""
        return cls(torch.device("cpu"), torch.contiguous_format)

    def model(self, model: Model) -> Model:
        """Move a model, in place; returns it."""
        return model.to(device=self.device, memory_format=self.memory_format)  # type: ignore[call-overload,no-any-return]

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's tensors, on the device already, laid out as :meth:`model` lays them out."""
        return {
            name: tensor.contiguous(memory_format=self.memory_format) if tensor.ndim == 4 else tensor
            for name, tensor in tensors.items()
        }

    def dataset(self, dataset: Dataset) -> Dataset:
        """Return a data set with its samples on the device, images in the memory format."""
        train, test = (samples.to(self.device, self.memory_format) for samples in (dataset.train, dataset.test))
        return replace(dataset, train=train, test=test)


def convolves(model: nn.Module) -> bool:
    """Say whether the memory format makes a difference to a model: whether it has two-dimensional convolutions."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def forward_chunk(device: torch.device) -> int:
    """Return how many samples go through a model at once where no gradient is asked for.

    A fixed number per kind of device, so that bits do not depend on who asks: on a CPU what its caches hold, on CUDA
    what fills it.
    """
    return 100 if device.type == "cpu" else 2000


def resolve_device(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    :raises ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device: {name!r} is no device; write auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: {name!r} is not supported; write auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"--device: {name!r} is not there; torch sees {torch.cuda.device_count()} CUDA devices. Use --device cpu."
        )
    return device
