"""This process and the Python processes that it starts: memory, imports, processors, threads, command lines.

Only :func:`one_thread` and :func:`one_torch_thread` import torch. The command line can use everything else before it
needs torch.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

CORES = "PYTHON_CPU_COUNT"
"""Environment variable with the number of processors, which Python 3.13 also reads. It is 1 in worker processes."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_MEMORY_OPTIONS = ((_TRIM_THRESHOLD, 512 << 20), (_MMAP_THRESHOLD, 128 << 20), (_ARENA_MAX, 1))


@contextmanager
def importing() -> Iterator[None]:
    """Import torch in the block without garbage collections, which would visit its modules again and again.

    Later collections also skip these modules. If torch is already imported, this does nothing.
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
    """Let the process end without a last garbage collection: the kernel takes the memory back anyway."""
    atexit.register(gc.freeze)


def keep_freed_memory() -> bool:
    """Let glibc keep up to 512 MiB of freed memory for all threads of the process; return whether it does.

    By default glibc returns the activations of a forward pass to the kernel, most of all the activations of threads.
    Page faults then bring the memory back, and evaluation took 15 % longer. If the user's environment sets glibc's
    options, they stay unchanged.
    """
    options = [name for name in os.environ if name.startswith("MALLOC_")]
    if options or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*option) for option in _MEMORY_OPTIONS)


def cores() -> int:
    """Return the number of processors that this process may use. The environment counts first, then the affinity."""
    number = os.environ.get(CORES, "")
    if number.isdecimal() and int(number):
        return int(number)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module, without the working directory on the import path.

    The working directory may be a run directory of unknown origin; a ``torch.py`` in it must not be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with its import path, so that a subprocess finds the same modules."""
    return {**os.environ, "PYTHONPATH": search_path(), **more}


def search_path() -> str:
    """Return this process's import path in the form of ``PYTHONPATH``."""
    return os.pathsep.join(folder or os.getcwd() for folder in sys.path)


_turn = threading.RLock()


@functools.lru_cache(1)
def _libraries(newest_module: str) -> Any:
    """Return the control of the libraries' threads. They are looked for anew only if a module was imported since."""
    import threadpoolctl

    return threadpoolctl.ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in the block, in torch and in the libraries below numpy and scipy.

    With more threads, a sum depends on how the work is divided. Everything that reaches weights or state is therefore
    computed in such a block. The number of threads and the global generators (:mod:`fedcore.base.seeding`) belong to
    the process. The block therefore waits while another thread of this process is in such a block, and warns about it.
    What the program has set for torch, such as autocast, has no effect in it.
    """
    from fedcore.base.seeding import host_generators_kept

    turn = _turn
    if not turn.acquire(blocking=False):
        warnings.warn(
            "fedcore is at work in another thread of this program; this call waits until it ends. Runs side by side "
            "need a process each, as fedcore sweep --parallel starts them",
            RuntimeWarning,
            stacklevel=3,
        )
        turn.acquire()
    try:
        with _torch_as_new(), _libraries(next(reversed(sys.modules))).limit(limits=1), host_generators_kept():
            yield
    finally:
        turn.release()


@contextmanager
def _torch_as_new() -> Iterator[None]:
    """Compute in the block with one thread of torch, and without what the program has set for torch.

    Workers and later processes have no default dtype or device, autocast or ``no_grad`` of the program.
    """
    import torch

    # Weights that an autocast in the block has cast would stay in torch's cache until the outermost autocast ends.
    dtype, without = torch.get_default_dtype(), functools.partial(torch.autocast, enabled=False, cache_enabled=False)
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    torch.set_default_dtype(torch.float32)
    try:
        with one_torch_thread(), torch.inference_mode(False), without("cpu"), without("cuda"), device:
            yield
    finally:
        torch.set_default_dtype(dtype)


def _begin_anew() -> None:
    """Replace the lock: the thread that holds it does not exist in a forked process."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Compute with one thread of torch in the block."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
