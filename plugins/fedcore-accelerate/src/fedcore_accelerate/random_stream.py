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
from fedcore_accelerate.stacked_step import NotStackable


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


class Generators:
    """The states of the global generators of torch, NumPy and Python at one moment."""

    def __init__(self, device: torch.device) -> None:
        self._generators = global_generators(device)
        self._numpy, self._python = np.random.get_state(legacy=False), random.getstate()
        self._torch = [each.get_state() for each in self._generators]

    @property
    def have_drawn(self) -> bool:
        """Whether one has drawn since then."""
        now, before = np.random.get_state(legacy=False)["state"], self._numpy["state"]
        same = now["pos"] == before["pos"] and np.array_equal(now["key"], before["key"])
        same = same and random.getstate() == self._python
        return not (same and all(map(torch.equal, self._torch, [each.get_state() for each in self._generators])))

    def restore(self) -> None:
        """Give all of them the states of that moment."""
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for each, state in zip(self._generators, self._torch, strict=True):
            each.set_state(state)


@contextmanager
def draws_refused(device: torch.device) -> Iterator[None]:
    """Refuse draws from the global generators in a block that works for several clients, and undo them.

    Each client has a stream of its own. ``vmap`` refuses torch's draws alone, and not those for a single client.

    :raises NotStackable: the block has drawn random numbers.
    """
    generators = Generators(device)
    try:
        yield
    finally:
        if drawn := generators.have_drawn:
            generators.restore()
    if drawn:
        raise NotStackable("a hook, the model or the data set draws random numbers from a global generator")
