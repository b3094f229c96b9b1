"""Processes that start by a fork, for tests that start many: it takes milliseconds instead of seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedcore_workers import template


@contextmanager
def forked_workers(*modules: str) -> Iterator[None]:
    """Let all runs in the block fork their worker processes from one process that has imported torch.

    A worker begins as a fresh process does, without the seconds of processor time that importing takes. Without such a
    block, each run has a process of this kind. On Linux only; elsewhere, this does nothing.

    :param modules: what that process also imports, because the forked processes need it.
    """
    with template(*modules):
        yield
