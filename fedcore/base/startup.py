"""Start and end of a process: standard streams, freed memory, and imports of torch without garbage collections."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_MEMORY_OPTIONS = ((_TRIM_THRESHOLD, 512 << 20), (_MMAP_THRESHOLD, 128 << 20), (_ARENA_MAX, 1))


@contextmanager
def importing() -> Iterator[None]:
    """Import torch in the block without garbage collections, which would visit all its modules again and again.

    Later collections leave them out, too. Does nothing where torch is imported already.
    """
    enabled = gc.isenabled()
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def end_without_collecting() -> None:
    """Let the process end without a last garbage collection, of memory that the kernel takes back anyway."""
    atexit.register(gc.freeze)


def keep_freed_memory() -> bool:
    """Let glibc keep up to 512 MiB of freed memory for all threads of the process; returns whether it does.

    By default it returns the activations of a forward pass to the kernel, above all those of threads, and page faults
    bring them back: evaluation took 15 % longer. Options in the environment, which the user set, stay as they are.
    """
    given = [name for name in os.environ if name.startswith("MALLOC_")]
    if given or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*option) for option in _MEMORY_OPTIONS)


def open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that the parent has closed, as /dev/null.

    Else the files that are opened next would take their numbers, and what libraries print would go into these files.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as the process lives
