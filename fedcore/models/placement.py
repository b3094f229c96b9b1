"""Device and memory format of a run's tensors: a fixed rule per device and model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedcore.base.config import ExecutionOptions
from fedcore.base.errors import ConfigError
from fedcore.base.seeding import random_stream
from fedcore.data import Dataset
from fedcore.models.split import training_copy

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Placement:
    """A device, and the memory format of images and convolutions on it.

    The format changes the order of additions in a convolution, and so the last bits of a result. It changes nothing
    else.
    """

    device: torch.device
    memory_format: torch.memory_format

    @classmethod
    def of(cls, options: ExecutionOptions, model: nn.Module, sample: Any) -> Placement:
        """Return the placement of a run.

        ``auto`` is channels_last for convolutional models on the CPU, and in bf16 on CUDA: measured 1.15 to 1.4
        times as fast per step (docs/performance.md). Float32 convolutions on CUDA keep the contiguous format, as do
        models that do not run in the other one.

        :param sample: a batch with one sample.
        """
        device = resolve_device(options.device)
        wanted = options.memory_format
        if wanted == "auto":
            suited = device.type == "cpu" or options.precision == "bf16"
            fits = suited and convolves(model) and not problem_in_channels_last(model, sample)
            wanted = "channels_last" if fits else "contiguous"
        return cls(device, torch.channels_last if wanted == "channels_last" else torch.contiguous_format)

    @classmethod
    def plain(cls) -> Placement:
        """Return the placement of stored models and updates: on the CPU, contiguous."""
        return cls(torch.device("cpu"), torch.contiguous_format)

    def model(self, model: Model) -> Model:
        """Move a model, in place; returns it. A parameter that is a part of a larger tensor gets memory of its own."""
        for parameter in model.parameters():
            if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
                parameter.data = parameter.data.clone()  # fused optimizers pair it with its gradient by place in memory
        return model.to(device=self.device, memory_format=self.memory_format)  # type: ignore[call-overload,no-any-return]

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's tensors, already on the device, in the format of :meth:`model`."""
        return {
            name: tensor.contiguous(memory_format=self.memory_format) if tensor.ndim == 4 else tensor
            for name, tensor in tensors.items()
        }

    def dataset(self, dataset: Dataset) -> Dataset:
        """Return a data set with its samples on the device, images in the memory format."""
        train, test = (samples.to(self.device, self.memory_format) for samples in (dataset.train, dataset.test))
        public = dataset.public
        if public is not None:
            samples = train if public.samples is dataset.train else public.samples.to(self.device, self.memory_format)
            public = replace(public, samples=samples, rows=public.rows.to(samples.labels.device))
        return replace(dataset, train=train, test=test, public=public)

    def on_host(self, dataset: Dataset) -> Dataset:
        """Return a data set on the CPU in the memory format: there :meth:`dataset` then makes no second copy of it."""
        return replace(self, device=torch.device("cpu")).dataset(dataset)


def convolves(model: nn.Module) -> bool:
    """Return whether the memory format affects a model: whether it has two-dimensional convolutions."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def problem_in_channels_last(model: nn.Module, sample: Any) -> str:
    """Return the error of a model whose weights and images are in channels_last; empty if it runs.

    ``x.view(len(x), -1)`` behind a convolution fails there, as the channels of a pixel lie next to each other.

    :param sample: a batch with one sample.
    """
    if not isinstance(sample, Tensor) or sample.ndim != 4:
        return ""
    images = sample.expand(2, *sample.shape[1:]).contiguous(memory_format=torch.channels_last)
    try:
        with torch.no_grad(), random_stream(0):
            trial = training_copy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            trial(images)
            trial.eval()(images)
    except Exception as error:  # one of another type is raised in every format, and the first round says so
        return str(error) if isinstance(error, RuntimeError) else ""
    return ""


def forward_chunk(device: torch.device, *shape: int) -> int:
    """Return the number of samples per forward pass without gradients.

    A constant per kind of device, so that results do not depend on the caller. It fits the caches of a CPU, and fills
    a CUDA device. With more than 262,144 numbers per sample, as of language models, it is smaller.

    :param shape: of a sample's logits.
    """
    most = 100 if device.type == "cpu" else 2000
    return max(1, min(most, (most << 18) // math.prod(shape)))


def resolve_device(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    :raises ConfigError: the machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"--device: {name!r} is not a supported device; write auto, cpu, cuda or cuda:N")
    if not has_device(name):
        raise ConfigError(f"--device: {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def has_device(name: str) -> bool:
    """Return whether this machine has a device; True for names that are not of a CUDA device."""
    cuda = re.fullmatch(r"cuda(?::(\d+))?", name)
    return cuda is None or int(cuda[1] or 0) < torch.cuda.device_count()
