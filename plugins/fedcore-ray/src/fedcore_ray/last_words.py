"""A line on stderr for a process that ends without one.

Ray ends the process of a run at once, past Python, when its raylet, one of its agents or the head is gone.
"""

from __future__ import annotations

import contextlib
import subprocess

WAITS = 'read -r _ || printf "\\n%s\\n" "$1" >&2'


class LastWords:
    """Prints a line when this process ends, unless they are taken back before.

    A shell waits at a pipe, which the kernel closes however the process ends.
    """

    def __init__(self, line: str) -> None:
        self._shell = subprocess.Popen(  # noqa: S603 - the line is an argument, not part of the script
            ["/bin/sh", "-c", WAITS, "sh", line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the run's own business
        )

    def take_back(self) -> None:
        """Let the process end without them; idempotent."""
        if self._shell.returncode is None:
            with contextlib.suppress(BrokenPipeError):
                self._shell.communicate(b"\n")
