"""Start and end of a process that imports torch, without walking its modules in search of garbage."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
