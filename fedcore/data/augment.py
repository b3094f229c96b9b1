"""MOON's augmentations, a whole batch at a time, on normalised images.

Each one maps every output pixel to the input pixel it shows, or to black, and gathers once: crop, flip and
rotation lose nothing by being composed, since all of them only move pixels. Source: QinbinLi/MOON,
``utils.py`` and ``datasets.py`` (CIFAR-10: reflecting pad 4, random crop, flip; CIFAR-100: zero pad 4, random
crop, flip, rotation by up to 15 degrees).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedcore.errors import UnknownNameError

PAD = 4
MAX_DEGREES = 15.0


def augment(name: str, x: Tensor, generator: torch.Generator, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return ``x`` (B, C, H, W), normalised by ``mean`` and ``std`` per channel, augmented as ``name`` says.

    All numbers are drawn from the CPU ``generator``, so they do not depend on the device of ``x``.

    :raises UnknownNameError: no augmentation of that name.
    """
    if name not in AUGMENTATIONS:
        raise UnknownNameError("augmentation", name, AUGMENTATIONS)
    return AUGMENTATIONS[name](x, generator, mean, std)


def _cifar10(x: Tensor, generator: torch.Generator, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    height, width = x.shape[2:]
    top, left, flip = _draw_crop_and_flip(len(x), generator)
    rows = _reflect(torch.arange(height) + top - PAD, height).unsqueeze(2)
    columns = _reflect(_flipped(torch.arange(width), flip, width) + left - PAD, width).unsqueeze(1)
    return _gather_pixels(x, rows * width + columns)


def _cifar100(x: Tensor, generator: torch.Generator, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    height, width = x.shape[2:]
    top, left, flip = _draw_crop_and_flip(len(x), generator)
    angle = (torch.rand(len(x), generator=generator) * 2 - 1) * MAX_DEGREES
    # Undone in reverse order: where was this pixel before the rotation, before the flip, before the crop?
    rows, columns = _rotated(angle, height, width)
    shown = _inside(rows, height) & _inside(columns, width)
    rows = rows + top.unsqueeze(2) - PAD
    columns = _flipped(columns, flip.unsqueeze(2), width) + left.unsqueeze(2) - PAD
    shown &= _inside(rows, height) & _inside(columns, width)
    moved = _gather_pixels(x, rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1))
    # Black is 0 before normalisation.
    black = torch.tensor([-m / s for m, s in zip(mean, std)], dtype=x.dtype, device=x.device)
    return torch.where(shown.unsqueeze(1).to(x.device), moved, black.view(1, -1, 1, 1))


AUGMENTATIONS: dict[str, Callable[[Tensor, torch.Generator, Sequence[float], Sequence[float]], Tensor]] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
}


def _draw_crop_and_flip(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return top and left corner of the crop in the padded image, (B, 1) int64, and flip, (B, 1) bool."""
    corner = torch.randint(0, 2 * PAD + 1, (2, batch, 1), generator=generator)
    flip = torch.rand(batch, 1, generator=generator) < 0.5
    return corner[0], corner[1], flip


def _reflect(position: Tensor, size: int) -> Tensor:
    """Return positions outside 0..size-1 mirrored at the border pixel, which is not repeated."""
    position = position.abs()
    return torch.where(position < size, position, 2 * (size - 1) - position)


def _flipped(columns: Tensor, flip: Tensor, width: int) -> Tensor:
    return torch.where(flip, width - 1 - columns, columns)


def _inside(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)


def _rotated(degrees: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return source rows and columns, each (B, H, W) int64, of a rotation about the centre.

    Counter-clockwise, nearest pixel, as torchvision's ``rotate``; may lie outside of the image.
    """
    radians = (degrees * (math.pi / 180)).view(-1, 1, 1)
    y = (torch.arange(height) - (height - 1) / 2).view(1, -1, 1)
    x = (torch.arange(width) - (width - 1) / 2).view(1, 1, -1)
    cos, sin = radians.cos(), radians.sin()
    rows = (sin * x + cos * y + (height - 1) / 2).round().long()
    columns = (cos * x - sin * y + (width - 1) / 2).round().long()
    return rows, columns


def _gather_pixels(x: Tensor, source: Tensor) -> Tensor:
    """Return images showing the pixels of ``x`` (B, C, H, W) at the flat positions ``source`` (B, H, W)."""
    batch, channels = x.shape[:2]
    index = source.reshape(batch, 1, -1).to(x.device).expand(-1, channels, -1)
    return x.flatten(2).gather(2, index).view(x.shape)
