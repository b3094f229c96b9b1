"""Python subprocesses: they import what this process can, and nothing from the working directory."""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module, without the working directory on the import path.

    The working directory may be a run directory of unknown origin; a ``torch.py`` in it must not be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with its import path, so that a subprocess finds the same modules."""
    return {**os.environ, "PYTHONPATH": search_path(), **more}


def search_path() -> str:
    """Return this process's import path in the form of ``PYTHONPATH``."""
    return os.pathsep.join(place or os.getcwd() for place in sys.path)
