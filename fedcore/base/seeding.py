"""Random streams: every one derives from (seed, purpose, round, client), none from what ran before it.

So a resumed run, another engine or another number of workers draws the same numbers, and no random state
has to be saved.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *, round: int | None = None, client: int | None = None) -> int:
    """Return a 63-bit seed that is a pure function of its arguments."""
    key = f"{seed}|{purpose}|{round}|{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *, round: int | None = None, client: int | None = None) -> torch.Generator:
    """Return a CPU generator for one purpose; draw on the CPU and move, so that devices agree."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, round=round, client=client))


def numpy_generator(
    seed: int, purpose: str, *, round: int | None = None, client: int | None = None
) -> np.random.Generator:
    """Return the NumPy counterpart of :func:`generator` (its numbers differ from torch's)."""
    return np.random.default_rng(derive_seed(seed, purpose, round=round, client=client))


def choose(population: int, count: int, stream: torch.Generator) -> list[int]:
    """Draw ``count`` of 0..population-1 uniformly without replacement: the first of a random permutation.

    A few of very many are drawn without the permutation, by the shuffle that ``torch.randperm`` does, broken off; the
    numbers are the same.
    """
    if count * _DRAW_COST > population or population >= _RANDPERM_CHANGES:
        return torch.randperm(population, generator=stream)[:count].tolist()
    moved: dict[int, int] = {}  # what stands where the permutation is no longer 0, 1, 2, ...
    chosen = []
    for place in range(count):
        other = place + int(torch.randint(population - place, (1,), generator=stream))
        chosen.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return chosen


_DRAW_COST = 500  # a number drawn on its own takes about as long as so many of a permutation
_RANDPERM_CHANGES = 1 << 27  # from somewhere above, randperm draws 64 bits at a time


@contextlib.contextmanager
def random_stream(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run a block on a stream of its own and give torch's global generators back untouched.

    For code that can only draw from the global generators: module constructors, dropout.
    """
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
