"""MOON's augmentations, a whole batch at a time, on normalised images.

Each augmentation maps every output pixel to an input pixel or to black, and gathers once: crop, flip and rotation
only move pixels, so their composition is exact. Source: QinbinLi/MOON,
``utils.py`` and ``datasets.py`` (CIFAR-10: reflecting pad 4, random crop, flip; CIFAR-100: zero pad 4, random
crop, flip, rotation by up to 15 degrees). All numbers come from the CPU generator, so they do not depend on the device
of the images.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PAD = 4
MAX_DEGREES = 15.0


def _draw_crop_and_flip(n: int, generator: torch.Generator) -> Tensor:
    """Return top and left corner of the crop in the padded image, and flip (0 or 1): (n, 3)."""
    corner = torch.randint(0, 2 * PAD + 1, (2, n, 1), generator=generator)
    flip = torch.rand(n, 1, generator=generator) < 0.5
    return torch.cat([corner[0], corner[1], flip], dim=1).float()


def _draw_move(n: int, generator: torch.Generator) -> Tensor:
    """Return crop and flip as one number, a row of :func:`_crops_and_flips`: (n, 1)."""
    top, left, flip = _draw_crop_and_flip(n, generator).unbind(dim=1)
    return ((top * (2 * PAD + 1) + left) * 2 + flip).unsqueeze(1)


def _draw_crop_flip_and_angle(n: int, generator: torch.Generator) -> Tensor:
    """Return the same and an angle in degrees: (n, 4)."""
    corner_and_flip = _draw_crop_and_flip(n, generator)
    angle = (torch.rand(n, 1, generator=generator) * 2 - 1) * MAX_DEGREES
    return torch.cat([corner_and_flip, angle], dim=1)


def _cifar10(x: Tensor, drawn: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return _gather_pixels(x, _crops_and_flips(*x.shape[2:], x.device).index_select(0, drawn[:, 0].long()))


@functools.cache
def _crops_and_flips(height: int, width: int, device: torch.device) -> Tensor:
    """Return the source pixel of each pixel for every crop and flip there is, (9 * 9 * 2, H * W) int64.

    A step looks its moves up: computed for each batch they would be twenty small operations.
    """
    corner = torch.arange(2 * PAD + 1, device=device).unsqueeze(1)
    flip = torch.tensor([[False], [True]], device=device)
    rows = _reflect(torch.arange(height, device=device) + corner - PAD, height)  # (9, H)
    columns = _reflect(_flipped(torch.arange(width, device=device), flip, width) + corner[:, None] - PAD, width)
    return (rows[:, None, None, :, None] * width + columns[:, :, None, :]).flatten(0, 2).flatten(1)


def _cifar100(x: Tensor, drawn: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    height, width = x.shape[2:]
    top, left, flip = drawn[:, :3].long().split(1, dim=1)  # (B, 1) each
    # Source positions, in reverse order: before the rotation, before the flip, before the crop.
    rows, columns = _rotated(drawn[:, 3], height, width)
    shown = _inside(rows, height) & _inside(columns, width)
    rows = rows + top.unsqueeze(2) - PAD
    columns = _flipped(columns, flip.bool().unsqueeze(2), width) + left.unsqueeze(2) - PAD
    shown &= _inside(rows, height) & _inside(columns, width)
    moved = _gather_pixels(x, rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1))
    black = [-m / s for m, s in zip(mean, std)]  # black is 0 before normalisation
    shown = shown.unsqueeze(1)
    return torch.cat(
        [torch.where(shown, part, value) for part, value in zip(moved.split(1, dim=1), black, strict=True)], dim=1
    )


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

    Counter-clockwise, nearest pixel, as torchvision's ``rotate``; positions may lie outside the image.
    """
    radians = (degrees * (math.pi / 180)).view(-1, 1, 1)
    y = (torch.arange(height, device=degrees.device) - (height - 1) / 2).view(1, -1, 1)
    x = (torch.arange(width, device=degrees.device) - (width - 1) / 2).view(1, 1, -1)
    cos, sin = radians.cos(), radians.sin()
    rows = (sin * x + cos * y + (height - 1) / 2).round().long()
    columns = (cos * x - sin * y + (width - 1) / 2).round().long()
    return rows, columns


def _gather_pixels(x: Tensor, source: Tensor) -> Tensor:
    """Return images showing the pixels of ``x`` (B, C, H, W) at the flat positions ``source`` (B, H, W)."""
    batch, channels = x.shape[:2]
    index = source.reshape(batch, 1, -1).expand(-1, channels, -1)
    return x.flatten(2).gather(2, index).view(x.shape)


class Augmentation(NamedTuple):
    """What the core calls: ``draw(n, generator)``, and ``apply(x, drawn, mean, std)``, which is capture-safe."""

    draw: Callable[[int, torch.Generator], Tensor]
    apply: Callable[[Tensor, Tensor, Sequence[float], Sequence[float]], Tensor]


CIFAR10 = Augmentation(_draw_move, _cifar10)
CIFAR100 = Augmentation(_draw_crop_flip_and_angle, _cifar100)
