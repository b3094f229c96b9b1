"""Random streams: each derives from (seed, purpose, round, client), never from earlier draws.

A resumed run, another engine or another number of workers therefore draws the same numbers. No random state has to be
saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


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
    """The global generators of torch, NumPy and Python, seeded for one purpose.

    Each block continues where the last one ended. For code that can only draw from the global generators: module
    constructors, dropout, a user's transforms.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generators, self._seed = global_generators(device), seed
        self._host: HostState | None = None

    @cached_property
    def states(self) -> list[torch.Tensor]:
        """The states of torch's generators, the device's last."""
        return [torch.Generator(each.device).manual_seed(self._seed).get_state() for each in self._generators]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Draw from the stream in the block, and restore the generators' states afterwards."""
        outside = [each.get_state() for each in self._generators]
        self._set(self.states)
        try:
            with _seeded_host(self._seed):
                if self._host is not None:
                    set_host_state(self._host)
                try:
                    yield
                finally:
                    self._host = host_state()
        finally:
            self.states = [each.get_state() for each in self._generators]
            self._set(outside)

    def _set(self, states: list[torch.Tensor]) -> None:
        for each, state in zip(self._generators, states, strict=True):
            each.set_state(state)


@contextlib.contextmanager
def random_stream(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python for a block, and restore their states afterwards."""
    generators = global_generators(device)
    outside = [each.get_state() for each in generators]
    for each in generators:
        each.manual_seed(seed)
    try:
        with _seeded_host(seed):
            yield
    finally:
        for each, state in zip(generators, outside, strict=True):
            each.set_state(state)


HostState = tuple[Any, Any]
"""The states of NumPy's and of Python's global generator."""

_nested: list[np.random.MT19937] = []
"""NumPy's bit generators of the open blocks' depths, which every block of that depth seeds anew: making one is slow."""
_depth = 0


@contextlib.contextmanager
def _seeded_host(seed: int) -> Iterator[None]:
    """Seed NumPy's and Python's global generators for a block, and restore their states afterwards.

    NumPy's generator is exchanged, which takes a fiftieth of the time of saving its state, but forgets the second half
    of a pair of normal numbers. :func:`host_generators_kept` keeps it for the code around a run.
    """
    global _depth
    if _depth == len(_nested):
        _nested.append(np.random.MT19937(0))
    numpy_outside, python_outside = mtrand.get_bit_generator(), random.getstate()
    mtrand.set_bit_generator(_nested[_depth])
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        mtrand.set_bit_generator(numpy_outside)
        random.setstate(python_outside)


def host_state() -> HostState:
    """Return the states of NumPy's and Python's global generators."""
    return np.random.get_state(legacy=False), random.getstate()


def set_host_state(state: HostState) -> None:
    """Set the states of NumPy's and Python's global generators."""
    np.random.set_state(state[0])
    random.setstate(state[1])


@contextlib.contextmanager
def host_generators_kept() -> Iterator[None]:
    """Restore the states of NumPy's and Python's global generators after a block."""
    outside = host_state()
    try:
        yield
    finally:
        set_host_state(outside)


def global_digest() -> bytes:
    """Return a digest of the states of all global generators on the host, which changes with every draw."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes())
    digest.update(f"{random.getstate()}{of_numpy['pos']}".encode() + of_numpy["key"].tobytes())
    return digest.digest()


def global_generators(device: torch.device | str) -> list[torch.Generator]:
    """Return torch's global generators, of the CPU and of a device."""
    generators, device = [torch.default_generator], torch.device(device)
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
