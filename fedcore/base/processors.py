"""How many processors this process may use."""

from __future__ import annotations

import os

VARIABLE = "PYTHON_CPU_COUNT"
"""Environment variable with their number, as Python 3.13 reads it; 1 in worker processes, one of which each has."""


def cores() -> int:
    """Return the number of processors that this process may use: by its environment, or else by its affinity."""
    given = os.environ.get(VARIABLE, "")
    if given.isdecimal() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
