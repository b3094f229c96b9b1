"""Random streams: each derives from (seed, purpose, round, client), never from earlier draws.

A resumed run, another engine or another number of workers therefore draws the same numbers. No random state has to be
saved.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *, round: int | None = None, client: int | None = None) -> int:
    """Return a 63-bit seed that is a pure function of its arguments."""
    key = f"{seed}|{purpose}|{round}|{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *, round: int | None = None, client: int | None = None) -> torch.Generator:
    """Return a CPU generator for one purpose. Draw on the CPU and move the numbers, so that devices agree."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, round=round, client=client))


def numpy_generator(
    seed: int, purpose: str, *, round: int | None = None, client: int | None = None
) -> np.random.Generator:
    """Return the NumPy counterpart of :func:`generator` (its numbers differ from torch's)."""
    return np.random.default_rng(derive_seed(seed, purpose, round=round, client=client))


def choose(population: int, count: int, stream: torch.Generator) -> list[int]:
    """Draw ``count`` of 0..population-1 uniformly without replacement: the first of a random permutation."""
    return torch.randperm(population, generator=stream)[:count].tolist()


class RandomStream:
    """torch's global generators, seeded for one purpose. Each block continues where the last one ended.

    For code that can only draw from the global generators: module constructors, dropout.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generators, self._seed = global_generators(device), seed

    @cached_property
    def states(self) -> list[torch.Tensor]:
        """The states of the generators, the device's last."""
        return [torch.Generator(each.device).manual_seed(self._seed).get_state() for each in self._generators]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Draw from the stream in the block, and restore the generators' state afterwards."""
        outside = [each.get_state() for each in self._generators]
        self._set(self.states)
        try:
            yield
        finally:
            self.states = [each.get_state() for each in self._generators]
            self._set(outside)

    def _set(self, states: list[torch.Tensor]) -> None:
        for each, state in zip(self._generators, states, strict=True):
            each.set_state(state)


def random_stream(seed: int, device: torch.device | str = "cpu") -> contextlib.AbstractContextManager[None]:
    """Seed torch's global generators for a block, and restore their state afterwards."""
    return RandomStream(seed, device).running()


def global_generators(device: torch.device | str) -> list[torch.Generator]:
    """Return torch's global generators, of the CPU and of a device."""
    generators, device = [torch.default_generator], torch.device(device)
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
