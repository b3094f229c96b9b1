"""Permissions of files that root obeys too, in whose name tests may run."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

VERSION = 0x20080522
OVERRIDE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def obeyed() -> Iterator[None]:
    """Let this thread meet the permissions of its files as every other user does, until the block ends (Linux)."""
    if os.geteuid() != 0:
        yield
        return
    libc, header, sets = ctypes.CDLL(None, use_errno=True), _Header(VERSION, 0), (_Sets * 2)()
    _require(libc.capget(ctypes.byref(header), sets))
    before = sets[0].effective
    sets[0].effective &= ~OVERRIDE
    _require(libc.capset(ctypes.byref(header), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _require(libc.capset(ctypes.byref(header), sets))


def _require(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
