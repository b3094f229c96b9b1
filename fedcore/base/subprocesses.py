"""Python processes of our own: they import what this one can, and nothing that happens to lie where it was started."""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module, without the working directory among the places to import from.

    It may be a stranger's run directory, and what is called ``torch.py`` in there must not be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, so that another one finds modules where this one does, in the same order."""
    return {**os.environ, "PYTHONPATH": search_path(), **more}


def search_path() -> str:
    """Return the places that this process imports from, as ``PYTHONPATH`` names them."""
    return os.pathsep.join(place or os.getcwd() for place in sys.path)
