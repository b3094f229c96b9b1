"""What ``--debug`` turns on in every process of a command: tracebacks of errors that a run survives."""

from __future__ import annotations

import os
import traceback

DEBUG = "FEDCORE_DEBUG"
"""The environment variable, which worker processes inherit."""


def print_traceback() -> None:
    """Print the traceback of the error that is being handled, where a command runs with ``--debug``."""
    if os.environ.get(DEBUG):
        traceback.print_exc()
