"""One thread for everything that reaches weights or state: with more, sums depend on how the work is divided.

The number of threads is the process's, as is torch's global generator (:mod:`fedcore.base.seeding`): threads of one
program that run fedcore take turns.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController

_turn = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, in torch and in the libraries below numpy and scipy; undone at the end.

    It waits until no other thread of this process is in such a block, and warns that it does.
    """
    turn = _turn
    if not turn.acquire(blocking=False):
        warnings.warn(
            "fedcore is at work in another thread of this program; this call waits until it ends. Runs side by side "
            "need a process each, such as those of fedcore sweep --parallel",
            RuntimeWarning,
            stacklevel=3,
        )
        turn.acquire()
    try:
        with one_torch_thread(), _libraries(tuple(sys.modules)).limit(limits=1):
            yield
    finally:
        turn.release()


def _begin_anew() -> None:
    """Leave the turn of a thread that a fork does not have."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


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
