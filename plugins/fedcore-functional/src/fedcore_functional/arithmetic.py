"""Arithmetic that contrast and class statistics share."""

from __future__ import annotations

import torch
from torch import Tensor


def membership(labels: Tensor, num_classes: int) -> Tensor:
    """Return the one-hot labels, (B,) -> (B, C) bool. ``F.one_hot`` would check its labels on the host."""
    return labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the wider of the two dtypes. Autocast would round cosines and means to 16 bits."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    with torch.autocast(device_type=a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)
