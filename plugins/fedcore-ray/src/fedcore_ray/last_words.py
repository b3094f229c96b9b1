"""A line on stderr for a process that ends without a message.

When its raylet, one of its agents or the head is gone, Ray ends the process of a run at once; no Python code runs then.
"""

from __future__ import annotations

import contextlib
import subprocess

WAITS = 'read -r _ || printf "\\n%s\\n" "$1" >&2'


class LastWords:
    """Prints a line when this process ends, unless :meth:`take_back` was called before.

    A shell reads from a pipe, which the kernel closes however the process ends.
    """

    def __init__(self, line: str) -> None:
        self._shell = subprocess.Popen(  # noqa: S603 - the line is an argument, not part of the script
            ["/bin/sh", "-c", WAITS, "sh", line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the run's own business
        )

    def take_back(self) -> None:
        """Let the process end without the line."""
        with contextlib.suppress(BrokenPipeError):
            self._shell.communicate(b"\n")
