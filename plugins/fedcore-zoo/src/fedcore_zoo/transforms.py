"""torchvision's transforms as an augmentation: ``torchvision:RandomHorizontalFlip,RandomRotation=15``, or an object."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedcore import ConfigError, UnknownNameError
from fedcore.client import random_stream
from fedcore.data import Dataset
from fedcore.tools import registry
from fedcore_zoo.augment import Augmentation
from fedcore_zoo.vision import load_torchvision

_SEEDS = 1 << 24
"""Seeds are drawn below this, up to which float32 has every whole number."""

_ROUNDING = 1e-3
"""Brightness this far beyond 0..1 is the rounding of the normalisation."""

_OF_COLORS = ("._color", "._auto_augment")
"""torchvision's modules of transforms that read values as brightness, from 0 to 1."""

_OF_PLACES = ("._geometry", "._auto_augment")
"""torchvision's modules of transforms that move pixels."""


class Transforms:
    """An augmentation that changes each image by a function of torchvision, or by one of its kind.

    Every image has a seed, from which the function draws by the global generators of torch, NumPy and Python. It gets
    one image (C, H, W) as it was before normalisation, float32, on the CPU or the device, and returns one of the same
    shape. Images of bytes are brightness 0..1; those of floats are what they were, and after ``--normalize client``
    each client's contrast is its own.

    :param function: such as ``torchvision.transforms.v2.Compose([...])``.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return a seed for each of n images, (n, 1) float32."""
        return torch.randint(_SEEDS, (n, 1), generator=generator).float()

    def apply(self, x: Tensor, drawn: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """Return images (B, C, H, W) that the function changed."""
        shape = (1, -1, *[1] * (x.ndim - 2))
        numbers = ((mean or [0.0]), (std or [1.0]))
        shift, scale = (torch.tensor(each, device=x.device, dtype=x.dtype).view(shape) for each in numbers)
        images = x * scale + shift if len(mean) else x
        bright = images.clamp(0, 1)
        if bool(((images - bright).abs() < _ROUNDING).all()):
            images = bright
        elif _is_of(self.function, _OF_COLORS):
            raise ConfigError(
                "the augmentation changes colours of brightness 0..1, and these images have values from "
                f"{images.min():.3g} to {images.max():.3g}: give bytes (uint8), without --normalize client"
            )
        changed = []
        for image, seed in zip(images, drawn[:, 0].tolist(), strict=True):
            with random_stream(int(seed)):
                changed.append(self.function(image))
            if changed[-1].shape != image.shape:
                raise ConfigError(
                    f"the augmentation turns an image {tuple(image.shape)} into {tuple(changed[-1].shape)}; the shape "
                    "has to stay, as with RandomCrop(size, padding=4) of the same size"
                )
        return (torch.stack(changed) - shift) / scale


def _is_of(function: Any, modules: tuple[str, ...]) -> bool:
    """Return whether a transform, or one inside of it, is of some of torchvision's modules."""
    inner = function if isinstance(function, nn.Sequential) else getattr(function, "transforms", ())
    return type(function).__module__.endswith(modules) or any(_is_of(each, modules) for each in inner)


def masks_stay(dataset: Dataset) -> Dataset:
    """Return a data set whose labels are masks, with a note that its augmentation changes images alone.

    :raises ConfigError: the augmentation moves pixels, so that the masks would be of other places.
    """
    name = str(dataset.augmentation)
    augmentation = registry.resolve("augmentation", name)
    if isinstance(augmentation, Augmentation) or (
        isinstance(augmentation, Transforms) and _is_of(augmentation.function, _OF_PLACES)
    ):
        raise ConfigError(
            f"augmentation {name} moves pixels, but the masks of task {dataset.task.name!r} would stay where they are; "
            "take one that leaves them in place, such as torchvision:GaussianBlur=3, or leave --augment out"
        )
    note = f"augmentation {name} changes images alone; the masks of task {dataset.task.name!r} stay where they are"
    return replace(dataset, notes=(*dataset.notes, note))


def torchvision(names: str) -> Transforms:
    """Return transforms of torchvision.transforms.v2 in order: ``NAME``, or ``NAME=NUMBER`` for its first argument.

    :raises UnknownNameError: torchvision has no such transform.
    :raises ConfigError: it cannot be made so.
    """
    load_torchvision()
    from torchvision.transforms import v2

    classes = {
        name: each for name, each in vars(v2).items() if isinstance(each, type) and issubclass(each, v2.Transform)
    }
    transforms = []
    for text in names.split(","):
        name, _, value = text.partition("=")
        if name not in classes:
            raise UnknownNameError("transform of torchvision", name, sorted(classes))
        try:
            transforms.append(classes[name](*([ast.literal_eval(value)] if value else [])))
        except (TypeError, ValueError, SyntaxError) as error:
            raise ConfigError(
                f"torchvision:{text} cannot be made ({error}); write NAME or NAME=NUMBER, or make an object of Python: "
                "fedcore_zoo.Transforms(v2.Compose([...])), named module:MODULE.OBJECT"
            ) from error
    return Transforms(v2.Compose(transforms))
