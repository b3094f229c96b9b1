"""Tensors whose memory outlives a session, so that steps captured in one client's session run in another's."""

from __future__ import annotations

import torch
from torch import Tensor


class FixedTensors:
    """Tensors at fixed addresses, by name; one set per client runtime.

    :ivar losses: the sums of losses, by name.
    """

    def __init__(self) -> None:
        self.losses: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}

    def fixed(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor with this value whose memory is the same at every call with this name."""
        held = self._tensors.get(name)
        if held is None or held.shape != value.shape:
            held = self._tensors[name] = torch.empty_like(value)
        held.copy_(value)
        return held
