"""A line on stderr for a process that ends without a message.

When its raylet, one of its agents or the head is gone, Ray ends the process of a run at once; no Python code runs then.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

WAITS = 'read -r _ || printf "\\n%s\\n" "$1" >&2'


@contextlib.contextmanager
def last_words(line: str) -> Iterator[subprocess.Popen[bytes]]:
    """Print a line if this process ends inside the block, however it ends.

    A shell reads from a pipe, which the kernel closes with the process.
    """
    shell = subprocess.Popen(  # noqa: S603 - the line is an argument, not part of the script
        ["/bin/sh", "-c", WAITS, "sh", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the run's own business
    )
    try:
        yield shell
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"\n")
