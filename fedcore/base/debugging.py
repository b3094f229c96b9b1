"""Where an error was raised, and the tracebacks of errors that a run survives, which ``--debug`` turns on."""

from __future__ import annotations

import linecache
import os
import traceback
from pathlib import Path

DEBUG = "FEDCORE_DEBUG"
"""The environment variable, which worker processes inherit."""


def print_traceback() -> None:
    """Print the traceback of the error that is being handled, where a command runs with ``--debug``."""
    if os.environ.get(DEBUG):
        traceback.print_exc()


def place_of(error: BaseException, module: str) -> str:
    """Return the last line of a module's package that an error passed, as `` (method.py:12)``; empty where none did.

    A line that is in no file is returned itself.
    """
    package, found = module.partition(".")[0], ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            file = frame.f_code.co_filename
            found = linecache.getline(file, line).strip() if file.startswith("<") else f"{Path(file).name}:{line}"
    return f" ({found})" if found else ""
