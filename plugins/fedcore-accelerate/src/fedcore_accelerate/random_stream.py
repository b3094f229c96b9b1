"""Random numbers of a training whose steps are taken between those of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedcore.client import global_generators, random_stream


class RandomStream:
    """The global generators of torch, NumPy and Python, seeded for one purpose.

    Each block continues where the last one ended. For code that can only draw from the global generators: dropout, a
    user's transforms.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed, self._device, self._generators = seed, device, global_generators(device)
        self._host: tuple[Any, Any] | None = None

    @cached_property
    def states(self) -> list[torch.Tensor]:
        """The states of torch's generators, the device's last."""
        return [torch.Generator(each.device).manual_seed(self._seed).get_state() for each in self._generators]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw from the stream in the block, and restore the generators' states afterwards."""
        with random_stream(self._seed, self._device):
            for each, state in zip(self._generators, self.states, strict=True):
                each.set_state(state)
            if self._host is not None:
                of_numpy, of_python = self._host
                np.random.set_state(of_numpy)
                random.setstate(of_python)
            try:
                yield
            finally:
                self.states = [each.get_state() for each in self._generators]
                self._host = np.random.get_state(legacy=False), random.getstate()
