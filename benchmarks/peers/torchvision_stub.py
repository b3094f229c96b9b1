"""Lets a torchvision that was built for another torch (CPU, some CUDA) be imported; peers do not use it."""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # It does not import unless its operators are declared.
    OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
