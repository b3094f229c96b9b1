"""One thread for everything that reaches weights or state: with more, sums depend on how the work is divided."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, in torch and in the libraries below numpy and scipy; undone at the end."""
    with one_torch_thread(), _libraries(tuple(sys.modules)).limit(limits=1):
        yield


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Compute with one thread in torch; undone at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=1)
def _libraries(modules: tuple[str, ...]) -> ThreadpoolController:
    """Return the loaded libraries that have threads; as finding them takes milliseconds, once for the same imports."""
    return ThreadpoolController()
