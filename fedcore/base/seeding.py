"""Random streams: each derives from (seed, purpose, round, client), never from earlier draws.

A resumed run, another engine or another number of workers therefore draws the same numbers. No random state has to be
saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

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


_nested: list[np.random.MT19937] = []
"""NumPy's bit generators of the open blocks' depths, which every block of that depth seeds anew: making one is slow."""
_depth = 0
_nobody_outside = False


def nobody_draws_outside() -> None:
    """Say that the global generators of this process serve :func:`random_stream` alone.

    Blocks then leave them as they are, except for the blocks around: to restore them takes a tenth of a small client's
    time.
    """
    global _nobody_outside
    _nobody_outside = True


@contextlib.contextmanager
def random_stream(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python for a block, and restore their states afterwards.

    NumPy's generator is exchanged, which takes a fiftieth of the time of saving its state, but forgets the second half
    of a pair of normal numbers. :func:`host_generators_kept` keeps it for the code around a run.
    """
    global _depth
    generators, outside = global_generators(device), None
    if _depth == len(_nested):
        _nested.append(np.random.MT19937(0))
    if _depth or not _nobody_outside:
        outside = mtrand.get_bit_generator(), random.getstate(), [each.get_state() for each in generators]
        mtrand.set_bit_generator(_nested[_depth])
    for each in generators:
        each.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if outside is not None:
            numpy_outside, python_outside, states = outside
            mtrand.set_bit_generator(numpy_outside)
            random.setstate(python_outside)
            for each, state in zip(generators, states, strict=True):
                each.set_state(state)


@contextlib.contextmanager
def host_generators_kept() -> Iterator[None]:
    """Restore the states of NumPy's and Python's global generators after a block."""
    numpy_outside, python_outside = np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_outside)
        random.setstate(python_outside)


def global_digest() -> bytes:
    """Return a digest of the states of all global generators on the host, which changes with every draw."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes())
    digest.update(f"{hash(random.getstate())}{of_numpy['pos']}".encode() + of_numpy["key"].tobytes())
    return digest.digest()


def global_generators(device: torch.device | str) -> list[torch.Generator]:
    """Return torch's global generators, of the CPU and of a device."""
    generators, device = [torch.default_generator], torch.device(device)
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
