"""Standard normal numbers in float64: from the operating system's secure source, or from a seed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Normal = Callable[[Sequence[int]], Tensor]
"""Takes a shape and returns independent standard normal numbers, float64 on the CPU."""

_DRAWS = 4
"""Normal numbers that are added up for one: the more, the less the low bits of a sum say of it."""
_MOST = 1 << 20
"""Numbers that are made at once, so that a large tensor takes no more memory than that."""


def secure_normal(shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers that cannot be reproduced, from ``os.urandom``.

    Each is the sum of four Box-Muller numbers, halved: a single one takes few of the values that float64 has, so that
    its low bits could tell noise from signal.

    :source: Holohan, Braghin, 2021, arXiv 2107.10138, Section 4.
    """
    count = math.prod(shape)
    parts = [_sum_of_draws(min(_MOST, count - start)) for start in range(0, count, _MOST)]
    numbers = np.concatenate(parts) if parts else np.zeros(0)
    return torch.from_numpy(numbers).reshape(tuple(shape))


def secure_uniform(count: int) -> list[float]:
    """Return uniform numbers in [0, 1) from ``os.urandom``."""
    return list((_bits(count) * 2.0**-53).tolist())


def seeded_normal(generator: torch.Generator) -> Normal:
    """Return what draws standard normal numbers from a seeded stream: for tests, no protection."""

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

    return draw


def _sum_of_draws(count: int) -> np.ndarray:
    return np.asarray(_box_muller(_DRAWS * count).reshape(_DRAWS, count).sum(axis=0) / math.sqrt(_DRAWS))


def _box_muller(count: int) -> np.ndarray:
    """Return an even ``count`` of standard normal numbers."""
    half = count // 2
    radius = np.sqrt(-2.0 * np.log((_bits(half) + 1.0) * 2.0**-53))  # of a uniform number in (0, 1]
    angle = 2.0 * np.pi * (_bits(half) * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def _bits(count: int) -> np.ndarray:
    """Return whole numbers of 53 random bits as float64, which holds them exactly."""
    return (np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)).astype(np.float64)
