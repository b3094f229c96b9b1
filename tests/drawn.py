"""Tensors in float64 that the tests of shared mathematics draw, and the labels of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

B, C, D = 12, 5, 7
LABELS = torch.tensor([0, 0, 1, 3, 3, 3, 1, 0, 0, 1, 3, 4])  # (B,): class 2 absent, class 4 a single sample


def numbers(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)
